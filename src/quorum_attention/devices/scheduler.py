"""A pass on several devices: who computes what next, and what happens when one is lost; and what
devices would do that are not here.

Each device has blocks of its own, the same ones in every call, because its worker has the memory of
those mapped and page-locked. A device without blocks of its own takes from the end of the fullest.

A device has one order at a time. Copies overlap with kernels inside an order; between two orders a
device waits 5 to 8 ms for messages, of the seconds that an order takes in long calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quorum_attention.call.block import CallBlock
from quorum_attention.devices.buffers import handle_of
from quorum_attention.devices.partition import pairs, partition, pieces_of
from quorum_attention.devices.report import PoolPass, Ran
from quorum_attention.devices.sums import Buffers, GradientSums
from quorum_attention.devices.worker import Answer, Compute, Worker, WorkerPass, end, listen
from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.report import Report
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.planner.calibration import calibrated_flops
from quorum_attention.planner.rates import assumed_hardware
from quorum_attention.units import counted

# Relative to an H200, whose rates the planner assumes (docs/planner.md). FlashAttention's published
# forward at head dimension 128 over cuDNN's there: 740 TFLOP/s on an H100 (version 3), 225 on an
# A100 (version 2); an H20 by its peak.
SPEEDS = {"H200": 1.0, "H100": 0.95, "H800": 0.95, "A100": 0.36, "H20": 0.15}
# What an order takes beside the call that computes it: its messages and what the worker maps.
_ORDER_SECONDS = 0.007


class Order(NamedTuple):
    """A block that a device computes, with so many pairs; ``home`` is the device that it belongs
    to."""

    number: int
    home: int
    block: CallBlock
    work: int
    begun: float = 0.0


class BlockQueue:
    """What waits and what runs. It knows neither workers nor a clock.

    Args:
        call: whose blocks they are.
        speeds: of each device that takes part, the pairs a second that are expected.
        pieces: as of ``partition``.

    Attributes:
        count: of all blocks.
        running: the order of each device that has one.
        devices: those that take part.
    """

    def __init__(self, shape: CallShape, speeds: Mapping[int, float], pieces: int) -> None:
        self.count, self.devices, self._speeds = 0, set(speeds), speeds
        # By home, what waits.
        self._waiting: dict[int, list[Order]] = {}
        homes = partition(shape, list(speeds.values()), pieces)
        for home, blocks in zip(speeds, homes, strict=True):
            orders = [Order(n, home, b, pairs(shape, b)) for n, b in enumerate(blocks, self.count)]
            self._waiting[home] = orders
            self.count += len(blocks)
        self.running: dict[int, Order] = {}

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return not self.running and not any(self._waiting.values())

    def take(self, device: int, now: float) -> Order | None:
        """What an idle device does next; None: nothing that would be done sooner by it."""
        if self._waiting[device]:
            order = self._waiting[device].pop(0)
        else:
            left = {home: sum(o.work for o in each) for home, each in self._waiting.items()}
            home = max(left, key=left.__getitem__)
            if not self._waiting[home]:
                return None
            last, speed = self._waiting[home][-1].work, self._speeds[device]
            if home in self.devices and last * self._speeds[home] > left[home] * speed:
                return None
            order = self._waiting[home].pop()
        self.running[device] = order._replace(begun=now)
        return self.running[device]

    def put_back(self, device: int, *, lost: bool = False) -> None:
        """Others may take what a device was at."""
        if lost:
            self.devices.discard(device)
        if (order := self.running.pop(device, None)) is not None:
            self._waiting[order.home].insert(0, order)


@dataclass(slots=True)
class Coordinator:
    """Runs one pass; it computes nothing itself.

    A worker that ends or runs out of memory at every depth leaves the pass; its order goes back and
    others compute it.

    Attributes:
        workers: all of the pool.
        spec: what workers have to know of the pass.
        schedule: its blocks.
        budgets: bytes that an order may take on each worker's device; None: what is free.
        report: filled with what happened.
        sums: adds up gradients; None in a forward.
        progress: told (blocks that are done, all blocks, which pass).
    """

    workers: Sequence[Worker]
    spec: WorkerPass
    schedule: BlockQueue
    budgets: Sequence[int | None]
    report: PoolPass
    sums: GradientSums | None = None
    progress: Callable[[int, int, str], None] | None = None
    _began: float = field(default_factory=time.perf_counter)
    _targets: dict[int, Buffers] = field(default_factory=dict)
    _error: Exception | None = None
    _out_of_memory: str = ""

    def run(self) -> None:
        """Run all blocks. After an error workers finish the orders that they have.

        Raises:
            OutOfMemoryError: memory ran out on every device.
            RuntimeError: no worker is left; the message says what was done.
            Exception: what a worker raised.
        """
        schedule, report = self.schedule, self.report
        report.devices = [f"{worker.device} ({worker.name})" for worker in self.workers]
        report.parts = schedule.count
        try:
            while schedule.running or not (self._error or schedule.finished):
                with self._noted():
                    self._launch()
                running = {number: self.workers[number] for number in schedule.running}
                for number, answer in listen(running) if running else ():
                    with self._noted():
                        self._take_in(number, answer)
            if self._error is not None:
                raise self._error
        finally:
            # They would write into results that the caller has back.
            computing = [self.workers[number] for number in schedule.running]
            for worker in computing:
                worker.process.kill()  # all, before another interrupt while one is waited for
            end(computing)
            report.seconds = time.perf_counter() - self._began

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """The first error is raised in the end; no order is given after it."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def _launch(self) -> None:
        """Orders for idle devices, where there are some for them."""
        schedule = self.schedule
        if not schedule.devices:
            raise self._given_up()
        for number in sorted(schedule.devices - set(schedule.running)):
            if self._error or (order := schedule.take(number, time.perf_counter())) is None:
                continue
            try:
                target = {} if self.sums is None else self.sums.buffers(order.block)
                self._targets[number] = target
                handles = {name: handle_of(tensor) for name, tensor in target.items()}
                message = Compute(self.spec, order.block, self.budgets[number], handles)
                sent = self.workers[number].send(message)
            except Exception:
                # No memory for sums, say. Nobody waits for an answer to what was never sent.
                schedule.put_back(number)
                raise
            if not sent:
                self._lost(number, "its worker has ended")

    def _take_in(self, number: int, answer: Answer | None) -> None:
        """What a worker says; None: it has ended."""
        if answer is None:
            self._lost(number, "its worker has ended")
        elif answer.number != self.spec.number:
            pass  # of an earlier pass, of which a second interrupt has left a worker
        elif answer.error is None:
            self._finished(number, answer.report)
        elif answer.broken:
            self._lost(number, f"its device has failed ({answer.error})")
        elif answer.memory:
            self._out_of_memory = f"; {answer.error}"
            # The worker is well: it only has no part in this pass any more.
            self._lost(number, "out of memory at every depth", end=False)
        else:
            self.schedule.put_back(number)
            where = f"in the worker of {self.report.devices[number]}:\n{answer.trace}"
            raise answer.error from RuntimeError(where)

    def _finished(self, number: int, made: Report) -> None:
        order, report = self.schedule.running.pop(number), self.report
        start, stop = order.begun - self._began, time.perf_counter() - self._began
        report.ran.append(Ran(number, order.number, start, stop, made))
        target = self._targets.pop(number)
        if self.sums is not None:
            self.sums.add(order.block, target)
        if self.progress is not None:
            name = "backward" if self.spec.backward else "forward"
            self.progress(len(report.ran), report.parts, name)

    def _lost(self, number: int, why: str, end: bool = True) -> None:
        """A device leaves the pass; its order goes back."""
        if end:
            self.workers[number].kill()
        self.schedule.put_back(number, lost=True)
        self.report.history.append(f"{self.report.devices[number]}: {why}")

    def _given_up(self) -> Exception:
        report = self.report
        said = "; ".join(report.history) or "all had ended before, or were closed"
        message = (
            f"no device is left after {len(report.ran)} of {counted(report.parts, 'part')}: {said}"
        )
        kind = OutOfMemoryError if self._out_of_memory else RuntimeError
        return kind(message + self._out_of_memory)


def expected_speed(
    device: str, name: str, dtype: torch.dtype, head_dim: int, *, backward: bool
) -> float:
    """Pairs a second of a device, calibrated where it has been, else assumed.

    Args:
        device: as torch calls it; ``name``: its own name.
    """
    place = torch.device(device)
    backend = backend_of(place)
    measured = calibrated_flops(backend, name, dtype, head_dim)
    if measured is not None:
        return measured[backward] / head_dim
    typical = assumed_hardware(place, dtype, head_dim)
    flops = typical.backward_flops if backward else typical.flops
    relative = next((speed for known, speed in SPEEDS.items() if known in name), 1.0)
    return relative * flops / head_dim


def simulate(shape: CallShape, devices: Sequence[tuple[str, float]], seconds: float) -> PoolPass:
    """A pass on devices, each a name and its speed; devices of equal names are alike.

    Args:
        seconds: of the whole call, on a device of speed 1.

    Returns:
        the report that a pool would have filled, its times predicted.
    """
    a_second = shape.batch * shape.heads * shape.pairs / seconds
    speeds = {number: speed * a_second for number, (_, speed) in enumerate(devices)}
    pieces = pieces_of(shape, speeds, uniform_cost=len(set(devices)) == 1)
    schedule = BlockQueue(shape, speeds, pieces)
    report = PoolPass(devices=[name for name, _ in devices], parts=schedule.count)
    ends, now = dict[int, float](), 0.0  # of the orders that run
    while not schedule.finished:
        for device in sorted(schedule.devices - ends.keys(), key=lambda device: -speeds[device]):
            if (order := schedule.take(device, now)) is not None:
                ends[device] = now + _ORDER_SECONDS + order.work / speeds[device]
        now, device = min((end, device) for device, end in ends.items())
        del ends[device]
        order = schedule.running.pop(device)
        report.ran.append(Ran(device, order.number, order.begun, now, Report()))
    report.seconds = now
    return report
