"""The coordinator with made-up workers: each part ends once, or the error says why not."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest

from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.report import Report
from quorum_attention.pool import run as pool_run
from quorum_attention.pool.messages import Begin, Compute, Done, Failed
from quorum_attention.pool.parts import Part, Sizes, cut_part, parts_of
from quorum_attention.pool.report import PoolPass
from quorum_attention.pool.run import Coordinator
from quorum_attention.pool.workers import Worker

SIZES = Sizes(1, 8, 8, 1024, 1024, True)
Behaviour = Callable[[Compute, int], "Done | Failed | None"]


class Process:
    """What a worker needs of a process; ends with its pipe."""

    exitcode = None

    def is_alive(self) -> bool:
        return False

    def join(self, seconds: float | None = None) -> None: ...


def worker(behaviour: Behaviour) -> Worker:
    """A worker whose answers are made up; None: it ends."""
    ours, theirs = multiprocessing.Pipe()

    def answer(pipe: Connection) -> None:
        count = 0
        while True:
            try:
                message: Any = pipe.recv()
            except (EOFError, OSError):
                return
            if not isinstance(message, Compute):
                continue
            count += 1
            said = behaviour(message, count)
            try:
                if said is None:
                    pipe.close()
                    return
                pipe.send(said)
            except OSError:
                return

    threading.Thread(target=answer, args=(theirs,), daemon=True).start()
    return Worker("cpu", Process(), ours)


def well(message: Compute, count: int) -> Done:
    return Done(message.number, message.index, 0.0, Report())


def failing(at: int, memory: bool, error: BaseException | str = "no memory") -> Behaviour:
    def behave(message: Compute, count: int) -> Done | Failed:
        if count < at:
            return well(message, count)
        return Failed(message.number, message.index, memory, error, "there")

    return behave


def ending(at: int) -> Behaviour:
    return lambda message, count: well(message, count) if count < at else None


def hanging(at: int, over: threading.Event) -> Behaviour:
    def behave(message: Compute, count: int) -> Done:
        if count >= at:
            over.wait()
        return well(message, count)

    return behave


def run(*behaviours: Behaviour, steady: bool = True) -> tuple[PoolPass, list[Part]]:
    workers = [worker(b) for b in behaviours]
    report = PoolPass(devices=[f"device {n}" for n in range(len(workers))])
    parts = parts_of(SIZES, len(workers), even=False)
    ended: list[Part] = []
    coordinator = Coordinator(
        workers, Begin(1, False, SIZES, {}), parts, lambda p: None,
        lambda p, s: ended.append(p), report, steady=steady,
    )  # fmt: skip
    try:
        coordinator.run()
    finally:
        for each in workers:
            each.pipe.close()
    assert sorted(ended) == sorted(parts)
    assert sorted(one.index for one in report.ran) == list(range(len(parts)))
    return report, parts


@pytest.mark.parametrize("seed", range(30))
def test_whoever_fails_the_others_finish(seed: int) -> None:
    draw = random.Random(seed)
    kinds: list[Callable[[int], Behaviour]] = [ending, lambda at: failing(at, True)]
    lost = [draw.choice(kinds)(draw.randint(1, 4)) for _ in range(draw.randint(1, 3))]
    behaviours = [*lost, well]
    draw.shuffle(behaviours)
    report, _ = run(*behaviours)
    assert len(report.history) <= 2 * len(lost)


@pytest.mark.parametrize("lost", [(1,), (1, 1), (2, 1)])
def test_a_coordinator_cuts_what_is_left(lost: tuple[int, ...]) -> None:
    """With made-up workers, of which some end at their first or second order."""
    behaviours: list[Behaviour] = [*map(ending, lost), well, well, well]
    workers = [worker(each) for each in behaviours]
    report = PoolPass(devices=[f"device {n}" for n in range(len(workers))])
    parts = parts_of(SIZES, len(workers))
    report.parts = len(parts)
    ended: list[Part] = []
    coordinator = Coordinator(
        workers, Begin(1, False, SIZES, {}), parts, lambda p: None,
        lambda p, s: ended.append(p), report, alike=True, cut=partial(cut_part, SIZES),
    )  # fmt: skip
    try:
        coordinator.run()
    finally:
        for each in workers:
            each.pipe.close()
    assert len(report.history) >= len(lost) - 1
    assert sorted(one.index for one in report.ran) == list(range(report.parts))
    rows = {(head, row) for part in ended for head in range(*part.heads)
            for row in range(*part.rows, 128)}  # fmt: skip
    assert len(rows) == 8 * 8
    assert sum(part.pairs(SIZES) for part in ended) == sum(part.pairs(SIZES) for part in parts)


def test_a_worker_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_run, "_HUNG_SECONDS", 0.2)
    over = threading.Event()
    try:
        report, _ = run(hanging(2, over), well)
    finally:
        over.set()
    assert any("no answer" in line for line in report.history)


def test_parts_that_are_not_alike_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be a hanging worker is one whose part is more work than its pairs say."""
    monkeypatch.setattr(pool_run, "_HUNG_SECONDS", 0.05)

    def slow(message: Compute, count: int) -> Done:
        time.sleep(1.0 if count == 2 else 0.0)  # many times what others take on busy cores
        return well(message, count)

    assert run(slow, well, steady=False)[0].history == []
    with pytest.raises(RuntimeError, match="no answer"):
        run(slow)


def test_the_last_one_out_of_memory() -> None:
    with pytest.raises(OutOfMemoryError, match=r"no device is left after \d+ of \d+ parts"):
        run(failing(2, True), failing(1, True))


def test_the_last_one_lost() -> None:
    with pytest.raises(RuntimeError, match=r"after 0 of \d+ parts.*device 1: its worker has ended"):
        run(ending(1), ending(1))


def test_nobody_there() -> None:
    gone = worker(well)
    gone.alive = False
    report = PoolPass(devices=["device 0"])
    parts = parts_of(SIZES, 2)
    with pytest.raises(
        RuntimeError, match=r"no device is left after 0 of \d+ parts: all had ended"
    ):
        Coordinator(
            [gone], Begin(1, False, SIZES, {}), parts, lambda p: None, lambda p, s: None, report
        ).run()
    gone.pipe.close()


def test_other_errors_come_through_and_workers_stay() -> None:
    workers = [worker(failing(1, False, ValueError("scale"))), worker(well)]
    report = PoolPass(devices=["device 0", "device 1"])
    parts = parts_of(SIZES, 2, even=False)
    with pytest.raises(ValueError, match="scale") as caught:
        Coordinator(
            workers, Begin(1, False, SIZES, {}), parts, lambda p: None, lambda p, s: None, report
        ).run()
    assert "there" in str(caught.value.__cause__)
    assert all(each.alive for each in workers)
    for each in workers:
        each.pipe.close()


def test_whoever_comes_takes_parts() -> None:
    """A worker that comes while a pass runs; and one that comes when the last one is lost."""
    coming = [[], [worker(ending(3))], []]

    def recruits(wait: bool) -> list[Worker]:
        return [worker(well)] if wait else coming.pop(0) if coming else []

    first = worker(ending(2))
    report = PoolPass(devices=["device 0"])
    parts = parts_of(SIZES, 2, even=False)
    ended: list[Part] = []
    coordinator = Coordinator(
        [first], Begin(1, False, SIZES, {}), parts, lambda p: None, lambda p, s: ended.append(p),
        report, recruits=recruits,
    )  # fmt: skip
    coordinator.run()
    assert sorted(ended) == sorted(parts)
    assert len(report.devices) == 3
    assert [line for line in report.history if "joined" in line] == [
        "device 1: joined",
        "device 2: joined",
    ]


def test_a_part_that_could_not_be_sent_is_not_waited_for() -> None:
    """No shared memory for sums: the error comes at once, and the workers stay."""
    workers = [worker(well), worker(well)]
    parts, report = parts_of(SIZES, 2, even=False), PoolPass(devices=["one", "two"])

    def sums(part: Part) -> None:
        if part == parts[1]:
            raise OSError("no file is left")

    coordinator = Coordinator(
        workers, Begin(1, False, SIZES, {}), parts, sums, lambda p, s: None, report
    )
    began = time.perf_counter()
    with pytest.raises(OSError, match="no file is left"):
        coordinator.run()
    assert time.perf_counter() - began < 10
    assert all(one.alive for one in workers)


def test_answers_of_an_earlier_pass_are_not_taken_for_this_ones() -> None:
    """A worker that a second interrupt has left at work answers late."""

    def twice(message: Compute, count: int) -> Done:
        late.send(Done(message.number - 1, message.index, 0.0, Report()))
        return well(message, count)

    ours, late = multiprocessing.Pipe()
    slow = worker(twice)
    slow.pipe, real = ours, slow.pipe

    def pass_on() -> None:
        with suppress(EOFError, OSError):
            while True:
                if late.poll(0.001):
                    real.send(late.recv())
                if real.poll(0.001):
                    late.send(real.recv())

    threading.Thread(target=pass_on, daemon=True).start()
    report, ended = PoolPass(devices=["one"]), list[Part]()
    parts = parts_of(SIZES, 1, even=False)
    Coordinator(
        [slow], Begin(7, False, SIZES, {}), parts, lambda p: None, lambda p, s: ended.append(p),
        report,
    ).run()  # fmt: skip
    assert sorted(ended) == sorted(parts)


def test_a_worker_that_says_what_nobody_understands_is_lost() -> None:
    class Garbage:
        def __reduce__(self) -> tuple[object, ...]:
            return int, ("none",)

    def talks(message: Compute, count: int) -> Any:
        return Garbage() if count == 2 else well(message, count)

    report, _ = run(talks, well)
    assert "device 0: its worker has ended" in report.history
