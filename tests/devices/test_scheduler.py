"""Blocks of a call cover it once, and each device has as much work as goes by its
speed; with made-up workers each block ends once, or the error says why not."""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from helpers.plans import shape_of

from quorum_attention.call.block import CallBlock, WholeCall
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.coordinator import Coordinator
from quorum_attention.devices.messages import (
    Answer,
    Compute,
    StoredHeads,
    WorkerPass,
)
from quorum_attention.devices.partition import is_whole, pairs, partition
from quorum_attention.devices.report import PoolPass
from quorum_attention.devices.simulation import simulate
from quorum_attention.devices.sums import GradientSums
from quorum_attention.devices.work_queue import BlockQueue
from quorum_attention.devices.worker_process import Worker
from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.report import Report
from quorum_attention.kernels import CallShape
from quorum_attention.kernels.tensors import NamedTensors

CALL = WholeCall(shape_of((1,), 8, 8, 1024, 1024, True))
Behaviour = Callable[[Compute, int], Any]


class Process:
    """What a worker needs of a process; ends with its pipe."""

    def kill(self) -> None: ...

    def join(self, seconds: float | None = None) -> None: ...


def worker(behaviour: Behaviour) -> Worker:
    """A worker whose answers are made up, one or several; None: it ends."""
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
            said: Any = behaviour(message, count)
            with suppress(OSError):
                for one in said if isinstance(said, list) else [said]:
                    if one is None:
                        pipe.close()
                        return
                    pipe.send(one)

    threading.Thread(target=answer, args=(theirs,), daemon=True).start()
    return Worker("cpu", Process(), ours)


def well(message: Compute, count: int) -> Answer:
    return Answer(message.worker_pass.number, Report())


def failing(at: int, memory: bool, error: Exception = MemoryError("none")) -> Behaviour:  # noqa: B008
    def behave(message: Compute, count: int) -> Answer:
        if count < at:
            return well(message, count)
        return Answer(message.worker_pass.number, Report(), error, "there", memory)

    return behave


def ending(at: int) -> Behaviour:
    return lambda message, count: well(message, count) if count < at else None


def hanging(at: int, over: threading.Event) -> Behaviour:
    def behave(message: Compute, count: int) -> Answer:
        if count >= at:
            over.wait()
        return well(message, count)

    return behave


class Told:
    """Told which blocks begin and which are done."""

    def __init__(
        self,
        done: Callable[[CallBlock], None],
        begun: Callable[[CallBlock], None] = lambda block: None,
    ) -> None:
        self.done, self.begun = done, begun

    def buffers(self, block: CallBlock) -> dict[str, Any]:
        self.begun(block)
        return {}

    def add(self, block: CallBlock, made: dict[str, Any]) -> None:
        self.done(block)


def coordinator(
    workers: list[Worker], sums: Told, pieces: int = 10
) -> tuple[Coordinator, PoolPass, list[CallBlock]]:
    report = PoolPass()
    for at, one in enumerate(workers):
        one.device = f"device {at}"
    speeds = dict.fromkeys(range(len(workers)), 1e15)
    schedule, homes = (
        BlockQueue(CALL.shape, speeds, pieces),
        partition(CALL.shape, [1.0] * len(workers), pieces),
    )
    spec, budgets, more = WorkerPass(7, False, CALL), [None] * len(workers), sums
    made = Coordinator(workers, spec, schedule, budgets, report, more)  # type: ignore[arg-type]
    return made, report, [block for home in homes for block in home]


def run(*behaviours: Behaviour) -> PoolPass:
    workers, ended = [worker(b) for b in behaviours], list[CallBlock]()
    made, report, units = coordinator(workers, Told(ended.append))
    try:
        made.run()
    finally:
        for each in workers:
            each.pipe.close()
    assert sorted(ended) == sorted(units)
    assert len(report.ran) == report.parts
    return report


@pytest.mark.parametrize("seed", range(30))
def test_whoever_fails_the_others_finish(seed: int) -> None:
    draw = random.Random(seed)
    kinds: list[Callable[[int], Behaviour]] = [ending, lambda at: failing(at, True)]
    lost = [draw.choice(kinds)(draw.randint(1, 4)) for _ in range(draw.randint(1, 3))]
    behaviours = [*lost, well]
    draw.shuffle(behaviours)
    report = run(*behaviours)
    assert len(report.history) <= 2 * len(lost)


def lost_after(n_heads: int, number: int = 7) -> Behaviour:
    """A worker that says how many heads of its block are stored, and ends."""
    return lambda message, count: [StoredHeads(number, n_heads), None]


def heads_done(*behaviours: Behaviour) -> tuple[list[tuple[int, int]], PoolPass]:
    """The heads that were done by workers with four heads each, and the report. Those
    that begin later get the blocks of lost ones."""
    workers, ended = [worker(b) for b in behaviours], list[CallBlock]()
    made, report, _ = coordinator(workers, Told(ended.append), pieces=1)
    try:
        made.run()
    finally:
        for each in workers:
            each.pipe.close()
    return sorted((b.heads.start, b.heads.stop) for b in ended), report


def test_heads_that_a_lost_worker_has_stored_are_not_computed_again() -> None:
    done, report = heads_done(lost_after(3), well)
    assert done == [(3, 4), (4, 8)]
    assert len(report.ran) == report.parts == 2
    (line,) = report.history
    assert line.endswith(
        "its worker has ended; 3 key/value heads of part 0 had been stored"
    )


def test_heads_are_left_out_that_several_workers_have_stored() -> None:
    """The second worker has the rest of the first one's block, and is lost with it."""

    def second(message: Compute, count: int) -> Any:
        return lost_after(2)(message, count) if count == 2 else well(message, count)

    workers, ended = [worker(b) for b in (lost_after(1), second)], list[CallBlock]()
    made, _, _ = coordinator(workers, Told(ended.append), pieces=1)
    with pytest.raises(
        RuntimeError, match="2 key/value heads of part 0 had been stored"
    ):
        made.run()
    (rest,) = made.queue._waiting[0]
    assert rest.block.heads == (3, 4)
    assert rest.pairs == pairs(CALL.shape, rest.block)
    assert [b.heads for b in ended] == [(4, 8)]


def test_memory_that_runs_out_leaves_stored_heads_too() -> None:
    def behave(message: Compute, count: int) -> Any:
        return [StoredHeads(7, 2), failing(1, True)(message, count)]

    assert heads_done(behave, well)[0] == [(2, 4), (4, 8)]


def test_a_note_of_an_earlier_pass_says_nothing_of_this_one() -> None:
    assert heads_done(lost_after(3, number=6), well)[0] == [(0, 4), (4, 8)]


def test_query_heads_are_left_out_with_their_key_value_head() -> None:
    shape = shape_of((2,), 12, 4, 256, 256)
    queue = BlockQueue(shape, {0: 1.0}, 1)
    first = queue.take(0, 0.0)
    assert first is not None
    queue.note_stored(0, 3)
    queue.put_back(0)
    rest = queue.take(0, 0.0)
    assert rest is not None
    assert rest.number == first.number
    assert rest.block == first.block._replace(heads=Interval(9, 12))
    assert rest.n_stored == 0


@pytest.mark.parametrize(
    ("behaviours", "kind", "said"),
    [
        ([failing(2, True), failing(1, True)], OutOfMemoryError, r"\d+ of \d+ parts"),
        (
            [ending(1), ending(1)],
            RuntimeError,
            r"0 of \d+ parts.*device 1 .*its worker has ended",
        ),
    ],
)
def test_the_last_one(
    behaviours: list[Behaviour], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=f"no device is left after {said}"):
        run(*behaviours)


def with_a_new_error(message: Compute, count: int) -> Answer:
    # One that the test held would hold its traceback.
    return failing(1, False, ValueError("scale"))(message, count)


@pytest.mark.parametrize("behaviour", [ending(1), with_a_new_error])
def test_an_error_that_was_handled_holds_no_memory(behaviour: Behaviour) -> None:
    """A cycle of the error, its traceback and the pass kept the call's shared
    memory."""
    sums = Told(lambda block: None)
    held = weakref.ref(sums)
    gc.disable()
    try:
        with suppress(RuntimeError, ValueError):
            coordinator([worker(behaviour)], sums)[0].run()
        del sums
        assert held() is None
    finally:
        gc.enable()


def test_other_errors_come_through_and_workers_stay() -> None:
    workers = [worker(failing(1, False, ValueError("scale"))), worker(well)]
    with pytest.raises(ValueError, match="scale") as caught:
        coordinator(workers, Told(print))[0].run()
    assert "there" in str(caught.value.__cause__)
    assert all(each.alive for each in workers)


def test_a_part_that_could_not_be_sent_is_not_waited_for() -> None:
    """No shared memory for sums: the error comes at once, and the workers stay."""
    workers, asked = [worker(well), worker(well)], list[CallBlock]()

    def sums(block: CallBlock) -> None:
        asked.append(block)
        if len(asked) == 2:
            raise OSError("no file is left")

    began = time.perf_counter()
    with pytest.raises(OSError, match="no file is left"):
        coordinator(workers, Told(print, sums))[0].run()
    assert time.perf_counter() - began < 10
    assert all(one.alive for one in workers)


def test_no_worker_goes_on_when_a_pass_is_interrupted() -> None:
    """It would write into results that the caller has back."""

    def interrupted(block: CallBlock) -> None:
        raise KeyboardInterrupt

    over = threading.Event()
    workers = [worker(hanging(1, over)), worker(well)]
    with pytest.raises(KeyboardInterrupt):
        coordinator(workers, Told(interrupted))[0].run()
    over.set()
    assert not workers[0].alive


def test_answers_of_an_earlier_pass_are_not_taken_for_this_ones() -> None:
    """A worker that a second interrupt has left at work answers late."""
    run(
        lambda message, count: [
            Answer(message.worker_pass.number - 1, Report()),
            well(message, count),
        ]
    )


def ideal(shape: CallShape, speeds: list[float]) -> float:
    """Seconds if all devices end together; one of speed 1 does a pair in a second."""
    return sum(pairs(shape, one) for one in partition(shape, [1.0])[0]) / sum(speeds)


@pytest.mark.parametrize(
    "speeds", [[1.0, 1.0], [1.0] * 3, [1.0] * 8, [1.0, 0.5], [2.0, 1.0, 0.3]]
)
@pytest.mark.parametrize("heads", [1, 3, 8, 33])
@pytest.mark.parametrize("causal", [False, True])
def test_devices_end_together(speeds: list[float], heads: int, causal: bool) -> None:
    call = shape_of((1,), heads, heads, 1 << 17, 1 << 17, causal)
    devices = [(f"of speed {speed}", speed) for speed in speeds]
    report = simulate(call, devices, ideal(call, [1.0]))
    assert report.seconds < 1.06 * ideal(call, speeds)


@pytest.mark.parametrize("seed", range(50))
def test_a_device_that_is_slower_than_was_expected_is_helped(seed: int) -> None:
    """Others take what it has not begun; every block is computed once."""
    draw = random.Random(seed)
    speeds = [draw.uniform(0.5, 1) for _ in range(draw.randint(2, 6))]
    heads = draw.randint(1, 9)
    call = shape_of((1,), heads, heads, 1 << 16, 1 << 16, True)
    schedule = BlockQueue(call, dict.fromkeys(range(len(speeds)), 1e15), 10)
    now, events, done = 0.0, list[tuple[float, int]](), set[CallBlock]()
    while not schedule.is_finished:
        for device in schedule.devices - set(schedule.running):
            order = schedule.take(device, now)
            if order is not None:
                events.append((now + order.pairs / speeds[device], device))
        events.sort()
        now, device = events.pop(0)
        done.add(schedule.running.pop(device).block)
    assert len(done) == schedule.count
    assert now < 1.25 * ideal(call, speeds)


@pytest.mark.parametrize("seed", range(200))
def test_every_row_of_every_head_is_in_one_block(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, share = draw.randint(1, 5), draw.choice([1, 1, 2, 5])
    n = draw.choice([1, 7, 128, 129, 1000, 5000])
    causal = draw.random() < 0.5
    call = shape_of(
        (draw.randint(1, 3),), kv_heads * share, kv_heads, n,
        n if causal else draw.randint(1, 900), causal, dropout=draw.random() >= 0.8,
    )  # fmt: skip
    speeds = [draw.choice([1.0, 1.0, 0.01, 7.0]) for _ in range(draw.randint(1, 9))]
    homes = partition(call, speeds, draw.choice([1, 10]))
    blocks = [block for home in homes for block in home]
    assert len(homes) == len(speeds)
    assert len(set(blocks)) == len(blocks)
    seen = np.zeros((*call.batch_shape, call.heads, n), int)
    for block in blocks:
        seen[block.entries.start, slice(*block.heads), slice(*block.rows)] += 1
        assert block.keys.stop >= (block.rows.stop if causal else call.n_keys)
        assert block.heads.length == 1 or block.rows == (0, n)
        assert is_whole(call, block) or WholeCall(call).key_heads(block).length == 1
    assert (seen == 1).all()
    if not call.dropout and n == 5000 and min(speeds) == max(speeds):
        work = [sum(pairs(call, one) for one in home) for home in homes]
        assert max(work) - min(work) < 2 * 128 * call.n_keys


def test_nothing_to_do() -> None:
    assert partition(shape_of((0,), 2, 2, 10, 10), [1.0, 1.0]) == [[], []]
    assert partition(shape_of((1,), 2, 2, 0, 10), [1.0, 1.0]) == [[], []]


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_added_up_in_the_same_way_whatever_comes_first(seed: int) -> None:
    draw = random.Random(seed)
    call = WholeCall(shape_of((2,), 6, 2, 1000, 1000, True))
    key = torch.randn(2, 2, 1000, 4).half()
    homes = partition(call.shape, [1.0] * draw.randint(2, 5), draw.choice([1, 10]))
    made: list[tuple[CallBlock, NamedTensors]] = []
    for block in (block for home in homes for block in home):
        buffers = GradientSums(call, key, key).buffers(block)
        if buffers:
            made.append(
                (block, {n: t.copy_(torch.randn(t.shape)) for n, t in buffers.items()})
            )
    found = []
    for _ in range(3):
        sums, grads = GradientSums(call, key, key), torch.zeros(2, 2, 2, 1000, 4)
        draw.shuffle(made)
        for one in made:
            sums.add(*one)
        sums.store(*grads)
        found.append(grads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    wanted = torch.zeros(2, 2, 1000, 4, dtype=torch.float64)
    for block, buffers in made:
        rows = wanted[block.entries.start, call.key_heads(block).start]
        rows[: block.keys.length] += buffers["grad_key"][0, 0]
    assert torch.allclose(found[0][0].double(), wanted, atol=1e-5)
