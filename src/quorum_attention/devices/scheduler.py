"""A pass on several devices: who computes what next, and what happens when one is lost.

Each device has units of its own, the same ones in every call, because its worker has the memory of
those mapped and page-locked. It takes several at once, as one order: a call of several units is
quicker than several calls. A device without units of its own takes from the end of the fullest.

A device has one order at a time. Copies overlap with kernels inside an order; between two orders a
device waits 5 to 8 ms for messages, of the seconds that an order takes in long calls.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

from quorum_attention.call.block import Block, WholeCall
from quorum_attention.devices.partition import Buffers, Sums, joined, pairs
from quorum_attention.devices.processes import Worker, listen
from quorum_attention.devices.report import PoolPass, Ran
from quorum_attention.devices.worker import Begin, Compute, Done, End, Failed
from quorum_attention.errors import OutOfMemoryError

# No order takes much longer: a device that is lost loses all of its order.
_LONGEST_SECONDS = 5.0
# A worker hangs if an order takes so many times what the slowest one before makes it; and at least
# so many seconds.
_HUNG_TIMES, _HUNG_SECONDS, _HOUR = 20.0, 60.0, 3600.0


@dataclass(frozen=True, slots=True)
class Order:
    """Units that a device computes at once; ``block`` is all of them, as one."""

    block: Block
    units: tuple[Block, ...]
    work: int
    begun: float


class Schedule:
    """What waits and what runs. It knows neither workers nor a clock.

    Args:
        call: whose blocks units are.
        homes: units of each device, in the order in which it should begin them.
        speeds: pairs a second that are expected of each device that takes part.
        at_once: whether a device takes all of its units, in equal orders that are not too long.

    Attributes:
        numbers: of all units.
        running: the order of each device that has one.
        devices: those that take part.
    """

    def __init__(
        self,
        call: WholeCall,
        homes: Sequence[Sequence[Block]],
        speeds: Mapping[int, float],
        at_once: bool = False,
    ) -> None:
        self._call, self._speeds, self._at_once = call, speeds, at_once
        self._waiting = [deque(units) for units in homes]
        self._homes = {unit: home for home, units in enumerate(homes) for unit in units}
        self.numbers = {unit: number for number, unit in enumerate(chain(*homes))}
        self.running: dict[int, Order] = {}
        self.devices = set(speeds)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return not self.running and not any(self._waiting)

    def take(self, device: int, now: float) -> Order | None:
        """What an idle device does next; None: nothing that would be done sooner by it."""
        if not any(self._waiting):
            return None
        left = [sum(self._work(unit) for unit in units) for units in self._waiting]
        own, home = bool(self._waiting[device]), device
        if not own:
            home = max(range(len(left)), key=lambda n: (bool(self._waiting[n]), left[n]))
        waiting, speed = self._waiting[home], self._speeds[device]
        share = 1.0 if own and self._at_once else 0.5
        if not own and home in self.devices:
            share = speed / (speed + self._speeds[home])
            if self._work(waiting[-1]) * self._speeds[home] > left[home] * speed:
                return None
        most = share * left[home]
        most = 1.001 * most / max(1, math.ceil(most / (_LONGEST_SECONDS * speed) - 1e-3))
        units = deque([waiting.popleft() if own else waiting.pop()])
        block = units[0]
        while waiting:
            two = (block, waiting[0]) if own else (waiting[-1], block)
            both = joined(self._call, *two)
            if both is None or self._work(both) > most:
                break
            block = both
            if own:
                units.append(waiting.popleft())
            else:
                units.appendleft(waiting.pop())
        order = self.running[device] = Order(block, tuple(units), self._work(block), now)
        return order

    def put_back(self, device: int) -> None:
        """Others may take what a device was at."""
        order = self.running.pop(device, None)
        for unit in order.units if order is not None else ():
            self._waiting[self._homes[unit]].append(unit)
        self._waiting = [deque(sorted(units, key=self.numbers.get)) for units in self._waiting]  # type: ignore[arg-type]

    def _work(self, block: Block) -> int:
        return pairs(self._call, block)


@dataclass(slots=True)
class DevicePass:
    """What a pass is.

    Attributes:
        begin: what workers have to know of it.
        schedule: its units.
        budgets: bytes that an order may take on each worker's device; None: what is free.
        steady: whether orders take as long as their pairs say; if not, each may take an hour.
        sums: adds up gradients; None in a forward.
        progress: told (units that are done, all units, which pass).
    """

    begin: Begin
    schedule: Schedule
    budgets: Sequence[int | None]
    steady: bool = True
    sums: Sums | None = None
    progress: Callable[[int, int, str], None] | None = None


class Coordinator:
    """Runs one pass; it computes nothing itself.

    A worker that ends, hangs or runs out of memory at every depth leaves the pass; its order goes
    back and others compute it.
    """

    def __init__(self, workers: Sequence[Worker], spec: DevicePass, report: PoolPass) -> None:
        self._workers, self._pass, self._report = workers, spec, report
        self._number, self._schedule = spec.begin.number, spec.schedule
        self._running = spec.schedule.running
        self._targets: dict[int, Buffers] = {}
        # Seconds for a pair, at most, of the orders that are done; None: none is.
        self._slowest: float | None = None
        self._errors: list[str] = []

    def run(self) -> None:
        """Run all units.

        Raises:
            OutOfMemoryError: memory ran out on every device.
            RuntimeError: no worker is left; the message says what was done.
            Exception: what a worker raised.
        """
        self._began = time.perf_counter()
        schedule, report = self._schedule, self._report
        report.devices = [worker.label for worker in self._workers]
        report.parts = len(schedule.numbers)
        try:
            for number in sorted(schedule.devices):
                if not self._workers[number].begin(self._pass.begin, self._pass.budgets[number]):
                    self._lost(number, "its worker has ended")
            while not schedule.finished:
                if not schedule.devices:
                    self._give_up()
                for number in sorted(schedule.devices - set(self._running)):
                    self._launch(number)
                if self._running:
                    self._hear()
        except Exception:
            self._drain()
            raise
        finally:
            self._stop()
            for worker in self._workers:
                if worker.alive:
                    worker.end(End(self._number))
            report.seconds = time.perf_counter() - self._began

    def _launch(self, number: int) -> None:
        """An order for an idle device, if there is one for it."""
        order = self._schedule.take(number, time.perf_counter())
        if order is None:
            return
        try:
            sums = self._pass.sums
            target = self._targets[number] = {} if sums is None else sums.buffers(order.block)
            sent = self._workers[number].compute(Compute(self._number, order.block, target))
        except Exception:
            # No memory for sums, say. Nobody waits for an answer to what was never sent.
            self._schedule.put_back(number)
            raise
        if not sent:
            self._lost(number, "its worker has ended")

    def _hear(self) -> None:
        """Take in what workers say; those that say nothing for too long are given up."""
        ends = {number: self._limit(one) + one.begun for number, one in self._running.items()}
        soonest = min(ends.values())
        seconds = None if math.isinf(soonest) else max(0.0, soonest - time.perf_counter())
        heard = listen({number: self._workers[number] for number in self._running}, seconds)
        # What is done first: a failure may end the pass.
        error: tuple[int, Failed] | None = None
        for number, answer in sorted(heard, key=lambda one: not isinstance(one[1], Done)):
            if answer is None:
                self._lost(number, "its worker has ended")
            elif answer.number != self._number:
                continue  # of an earlier pass, of which a second interrupt has left a worker
            elif isinstance(answer, Done):
                self._finished(number, answer)
            elif answer.broken:
                self._lost(number, f"its device has failed ({answer.error})")
            elif answer.memory:
                self._errors.append(str(answer.error))
                # The worker is well: it only has no part in this pass any more.
                self._lost(number, "out of memory at every depth", end=False)
            else:
                self._schedule.put_back(number)
                error = number, answer
        if error is not None:
            number, failed = error
            there = f"in the worker of {self._report.devices[number]}:\n{failed.trace}"
            raised = failed.error
            if not isinstance(raised, BaseException):
                raised = RuntimeError(raised)
            raise raised from RuntimeError(there)
        now = time.perf_counter()
        for number in [n for n in ends if not heard and n in self._running and ends[n] <= now]:
            self._lost(number, f"no answer for {now - self._running[number].begun:.0f} s")

    def _limit(self, order: Order) -> float:
        """Seconds after which an order is taken from its worker."""
        if self._slowest is None:
            return math.inf if len(self._running) == 1 else _HOUR
        if not self._pass.steady:
            return _HOUR
        return max(_HUNG_SECONDS, _HUNG_TIMES * self._slowest * order.work)

    def _finished(self, number: int, answer: Done) -> None:
        now, order, spec = time.perf_counter(), self._running.pop(number), self._pass
        self._slowest = max(self._slowest or 0.0, (now - order.begun) / max(1, order.work))
        report, index = self._report, self._schedule.numbers[order.units[0]]
        start, stop, count = order.begun - self._began, now - self._began, len(order.units)
        report.ran.append(Ran(number, index, start, stop, answer.report, answer.seconds, count))
        target = self._targets.pop(number)
        if spec.sums is not None:
            spec.sums.add(order.block, target)
        if spec.progress is not None:
            done = sum(one.parts for one in report.ran)
            spec.progress(done, report.parts, "backward" if spec.begin.backward else "forward")

    def _lost(self, number: int, why: str, end: bool = True) -> None:
        """A device leaves the pass; its order goes back."""
        if end:
            self._workers[number].kill()
        self._schedule.put_back(number)
        self._schedule.devices.discard(number)
        self._report.history.append(f"{self._report.devices[number]}: {why}")

    def _stop(self) -> None:
        """End the workers that compute: they would write into results that the caller has back."""
        for number in list(self._running):
            try:
                self._workers[number].kill()
            except KeyboardInterrupt:  # another one, while it waited for the first ones to end
                self._workers[number].kill()

    def _drain(self) -> None:
        """Let workers finish the orders they have, so that they can be used again."""
        limit = time.monotonic() + _HUNG_SECONDS
        while self._running and time.monotonic() < limit:
            for number, answer in listen({n: self._workers[n] for n in self._running}, 1.0):
                if answer is None:
                    self._workers[number].kill()
                if answer is None or answer.number == self._number:
                    self._schedule.put_back(number)

    def _give_up(self) -> NoReturn:
        done = sum(one.parts for one in self._report.ran)
        said = "; ".join(self._report.history) or "all had ended before, or were closed"
        message = f"no device is left after {done} of {self._report.parts} parts: {said}"
        if self._errors:
            raise OutOfMemoryError(f"{message}; {self._errors[-1]}")
        raise RuntimeError(message)
