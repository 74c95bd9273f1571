"""A second order that waits at its worker is had once, by it or by another, whoever fails when."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.report import Report
from quorum_attention.pool import run as pool_run
from quorum_attention.pool.hired import Hired
from quorum_attention.pool.messages import Begin, Begun, Compute, Done, Failed
from quorum_attention.pool.parts import Sizes, homes_of, joined, parts_of
from quorum_attention.pool.report import PoolPass
from quorum_attention.pool.run import Coordinator
from quorum_attention.pool.shelf import Shelf
from quorum_attention.pool.worker import _next
from quorum_attention.pool.workers import Worker

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="not Linux")

Behaviour = Callable[[Compute, int], "Done | Failed | None"]
SIZES = Sizes(1, 8, 8, 1024, 1024, True)


class Process:
    """What a worker needs of a process; ends with its pipe."""

    exitcode = None

    def is_alive(self) -> bool:
        return False

    def join(self, seconds: float | None = None) -> None: ...


def worker(behaviour: Behaviour) -> Worker:
    """A worker with a shelf, whose answers are made up; None: it ends."""
    ours, theirs = multiprocessing.Pipe()
    shelf = Shelf.made()
    assert shelf is not None

    def obey() -> None:
        in_pass, well, count = False, True, 0
        while True:
            message: Any = _next(theirs, shelf.outlet if in_pass and well else None)
            if not isinstance(message, Compute):
                in_pass, well = isinstance(message, Begin), True
                continue
            count += 1
            theirs.send(Begun(message.number, message.index))
            said = behaviour(message, count)
            if said is None:
                theirs.close()
                return
            well = isinstance(said, Done)
            theirs.send(said)

    def until_closed() -> None:
        try:
            obey()
        except (EOFError, OSError, ValueError):
            return

    threading.Thread(target=until_closed, daemon=True).start()
    return Worker("cpu", Process(), ours, shelf=shelf)


def done(message: Compute) -> Done:
    return Done(message.number, message.index, 1e-4, Report())


def well(message: Compute, count: int) -> Done:
    return done(message)


def coordinator(
    workers: list[Worker], ended: list[Any], number: int = 1, sizes: Sizes = SIZES,
    even: bool = False, together: bool = False, seconds: float = 0.01,
) -> Coordinator:  # fmt: skip
    alive = [n for n, one in enumerate(workers) if one.alive]
    parts = parts_of(sizes, len(alive), even=even)
    pairs = sum(part.pairs(sizes) for part in parts)
    report = PoolPass(devices=[f"device {n}" for n in range(len(workers))])
    return Coordinator(
        [Hired(one, None) for one in workers], Begin(number, False, sizes, {}), parts,
        lambda part: None, lambda part, sums: ended.append(part), report,
        join=partial(joined, sizes) if together else None,
        paces=dict.fromkeys(alive, seconds / pairs), timed=True, alike=even,
        homes=homes_of(sizes, parts, alive) if even else None, may_wait=lambda part: True,
    )  # fmt: skip


def covered(ended: list[Any], sizes: Sizes) -> None:
    """Every row of every head once."""
    for head in range(sizes.heads):
        rows = sorted(tuple(p.rows) for p in ended if p.heads.start <= head < p.heads.stop)
        assert [start for start, _ in rows] == [0, *(stop for _, stop in rows[:-1])]
        assert rows[-1][1] == sizes.n_queries


def random_behaviour(draw: random.Random) -> Behaviour:
    kind, at = draw.choice(["well"] * 4 + ["ends", "memory", "error"]), draw.randint(1, 5)
    slow = draw.choice([1.0, 1.0, 3.0])

    def behave(message: Compute, count: int) -> Done | Failed | None:
        time.sleep(slow * 3e-4 * draw.random())
        if count < at or kind == "well":
            return done(message)
        if kind == "ends":
            return None
        error = ValueError("scale") if kind == "error" else "no memory"
        return Failed(message.number, message.index, kind == "memory", error, "there")

    return behave


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_or_done_twice(seed: int) -> None:
    """Three passes of the same workers, some of which end, run out of memory or raise an error."""
    draw = random.Random(seed)
    done_by: list[tuple[int, Any]] = []

    def noted(behaviour: Behaviour) -> Behaviour:
        def behave(message: Compute, count: int) -> Done | Failed | None:
            said = behaviour(message, count)
            if isinstance(said, Done):
                done_by.append((message.number, message.part))
            return said

        return behave

    workers = [worker(noted(random_behaviour(draw))) for _ in range(draw.randint(1, 4))]
    for number in range(3):
        if not any(one.alive for one in workers):
            break
        heads = draw.choice([1, 2, 3, 5, 8])
        sizes = Sizes(1, heads, heads, draw.choice([256, 1024]), 1024, draw.random() < 0.5)
        ended: list[Any] = []
        one = coordinator(
            workers, ended, number, sizes, draw.random() < 0.5, draw.random() < 0.7
        )  # fmt: skip
        try:
            one.run()
        except (ValueError, OutOfMemoryError, RuntimeError):
            pass
        else:
            covered(ended, sizes)
            if all(each.alive for each in workers):
                assert sum(n == number for n, _ in done_by) == len(ended)
        # What waited for a worker that stays was taken back, or done.
        assert not any(each.shelf.take_back() for each in workers if each.alive and each.shelf)
    for each in workers:
        each.kill()


def test_what_waits_at_a_slow_worker_goes_to_one_that_is_idle() -> None:
    over = threading.Event()
    seen: list[int] = []

    def slow(message: Compute, count: int) -> Done:
        seen.append(message.index)
        if count == 1:
            over.wait(20)
        return done(message)

    workers, ended = [worker(slow), worker(well)], list[Any]()
    steps = coordinator(workers, ended).steps()
    for _ in steps:
        if len(ended) == len(parts_of(SIZES, 2, even=False)) - 1:
            over.set()  # all is done but its first order
    assert len(seen) == 1
    covered(ended, SIZES)
    for each in workers:
        each.kill()


def test_both_orders_of_a_lost_worker_go_to_others() -> None:
    gone, ended = worker(lambda message, count: None), list[Any]()
    workers = [gone, worker(well)]
    coordinator(workers, ended).run()
    assert not gone.alive
    covered(ended, SIZES)
    workers[1].kill()


def test_no_worker_goes_on_when_a_pass_is_interrupted_between_two_orders() -> None:
    """The first is done, and the second not yet taken for begun."""
    hold = threading.Event()

    def second_waits(message: Compute, count: int) -> Done:
        hold.wait(20 if count == 2 else 0)
        return done(message)

    workers = [worker(second_waits)]
    one = coordinator(workers, [])

    def interrupted(number: int, now: float) -> None:
        if one._dispatch.queued:
            raise KeyboardInterrupt

    one._dispatch.go_on = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert not workers[0].alive
    hold.set()


def test_a_pool_that_is_closed_while_its_workers_are_listened_to() -> None:
    """By another thread: its workers are gone, whatever a pipe says that is just being closed."""
    closed, other = worker(well), worker(well)
    closed.kill()
    assert pool_run.listen([closed, other], 0.1) == [(closed, None)]
    other.kill()


def test_two_threads_that_end_a_worker_close_its_pipe_once() -> None:
    one, closes = worker(well), [0]

    class Pipe:
        closed = False

        def close(self) -> None:
            if not self.closed:
                time.sleep(0.05)
                closes[0] += 1
                self.closed = True

    one.pipe.close()
    one.pipe = Pipe()  # type: ignore[assignment]
    threads = [threading.Thread(target=one.kill) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert closes == [1]


def test_two_errors_at_once_end_the_pass_at_once() -> None:
    """Nobody waits for a worker that has answered already."""
    both = threading.Barrier(2)

    def failing(message: Compute, count: int) -> Failed:
        both.wait(20)
        return Failed(message.number, message.index, False, ValueError("scale"), "there")

    def listened(workers: Any, seconds: float | None) -> Any:
        time.sleep(0.05)  # for both answers
        return pool_run.listen(workers, seconds)

    workers = [worker(failing), worker(failing)]
    one = coordinator(workers, [])
    one._listen = listened
    begun = time.monotonic()
    with pytest.raises(ValueError, match="scale"):
        one.run()
    assert time.monotonic() - begun < 20
    assert all(each.alive for each in workers)
    for each in workers:
        each.kill()


def test_an_order_hangs_from_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits longer than a worker may take is not given up."""
    monkeypatch.setattr(pool_run, "_HUNG_SECONDS", 0.6)
    monkeypatch.setattr(pool_run, "_HUNG_TIMES", 0.0)

    def slow(message: Compute, count: int) -> Done:
        time.sleep(0.4)
        return done(message)

    workers, ended = [worker(slow)], list[Any]()
    sizes = Sizes(1, 3, 3, 256, 256, True)
    one = coordinator(workers, ended, sizes=sizes)
    one.run()
    assert len(ended) == 3
    assert one._report.history == []
    assert all(ran.stop - ran.start < 0.6 for ran in one._report.ran)
    workers[0].kill()
