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
from types import MappingProxyType
from typing import Any, NoReturn

from quorum_attention.devices.messages import Begin, Compute, Done, End, Failed
from quorum_attention.devices.processes import Worker, listen
from quorum_attention.devices.report import PoolPass, ran
from quorum_attention.errors import OutOfMemoryError

# The share that a device takes at once of what it will presumably do; where it may be slower than
# expected, of which it has not told yet, a smaller one.
_SHARE, _UNSURE_SHARE = 0.6, 0.25
# No order takes much longer: a device that is lost loses all of its order.
_LONGEST_SECONDS = 5.0
# A worker hangs if an order takes so many times what its last one, or those of others, make it; and
# at least so many seconds.
_HUNG_TIMES, _HUNG_SECONDS, _HOUR = 20.0, 60.0, 3600.0


@dataclass(frozen=True, slots=True)
class Order:
    """Units that a device computes at once; ``part`` is all of them, as one, ``index`` the number
    of the first."""

    part: Any
    units: tuple[Any, ...]
    index: int
    work: float
    begun: float


class Schedule:
    """What waits and what runs. It knows neither workers nor a clock.

    Args:
        units: of each device, in the order in which it should begin them.
        work: how much a unit is.
        join: two units as one; None where they are none. No function: units stay as they are.
        speeds: work a second that is expected of each device.
        alike: whether devices may be taken to be as quick as expected, beside each other.
        at_once: whether a device takes all of its units, in equal orders that are not too long.

    Attributes:
        numbers: of all units.
        running: the order of each device that has one.
        devices: those that take part.
        seen: work a second of each, in this pass.
    """

    def __init__(
        self,
        units: Sequence[Sequence[Any]],
        work: Callable[[Any], float],
        join: Callable[[Any, Any], Any] | None = None,
        speeds: Mapping[int, float] = MappingProxyType({}),
        alike: bool = False,
        at_once: bool = False,
    ) -> None:
        self.work, self._join, self._alike, self._at_once = work, join, alike, at_once
        self._place = {
            unit: (home, n) for home, every in enumerate(units) for n, unit in enumerate(every)
        }
        self.numbers = {unit: number for number, unit in enumerate(self._place)}
        self._waiting = [deque(every) for every in units]
        self._expected, self.seen = speeds, dict[int, float]()
        self.running: dict[int, Order] = {}
        self.devices: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return not self.running and not any(self._waiting)

    def take(self, device: int, now: float) -> Order | None:
        """What an idle device does next; None: nothing."""
        if not any(self._waiting):
            return None
        left = [sum(map(self.work, units)) for units in self._waiting]
        home = max(range(len(left)), key=lambda n: (bool(self._waiting[n]), left[n]))
        if device < len(left) and self._waiting[device]:
            home = device
        own = home == device
        waiting = self._waiting[home]
        if self._hinders(device, self.work(waiting[0 if own else -1]), sum(left), now):
            return None
        most = self._most(device, left[home] if own else math.inf, sum(left))
        units = deque([waiting.popleft() if own else waiting.pop()])
        part = units[0]
        while self._join is not None and waiting:
            both = self._join(part, waiting[0]) if own else self._join(waiting[-1], part)
            if both is None or self.work(both) > most:
                break
            part = both
            if own:
                units.append(waiting.popleft())
            else:
                units.appendleft(waiting.pop())
        order = Order(part, tuple(units), self.numbers[units[0]], self.work(part), now)
        self.running[device] = order
        return order

    def shares(self, order: Order) -> list[tuple[int, float]]:
        """Number and work of each of an order's units."""
        return [(self.numbers[unit], self.work(unit)) for unit in order.units]

    def done(self, device: int, seconds: float) -> Order:
        """A device has done its order."""
        order = self.running.pop(device)
        if order.work and seconds > 0:
            self.seen[device] = order.work / seconds
        return order

    def put_back(self, device: int) -> None:
        """Others may take what a device was at."""
        order = self.running.pop(device, None)
        for unit in order.units if order is not None else ():
            self._waiting[self._place[unit][0]].append(unit)
        self._waiting = [
            deque(sorted(units, key=self._place.__getitem__)) for units in self._waiting
        ]

    def lost(self, device: int) -> None:
        """A device takes part no more."""
        self.put_back(device)
        self.devices.discard(device)
        self.seen.pop(device, None)

    def _speed(self, device: int) -> float:
        """Work a second: as seen, or as expected beside those that were seen."""
        if device in self.seen:
            return self.seen[device]
        expected = self._expected
        usual = sum(expected.values()) / len(expected) if expected else 1.0
        ratios = [speed / expected.get(n, usual) for n, speed in self.seen.items()]
        return expected.get(device, usual) * (sum(ratios) / len(ratios) if ratios else 1.0)

    def _most(self, device: int, left: float, every: float) -> float:
        """How much work an order may be."""
        if self._at_once and left < math.inf:
            # By what is expected: the sizes of orders are the same in every call, and so are plans.
            longest = _LONGEST_SECONDS * self._expected.get(device, math.inf)
            return 1.001 * left / max(1, math.ceil(left / longest - 1e-3))
        fair = every * self._speed(device) / sum(map(self._speed, self.devices))
        known = bool(self.seen) or bool(self._expected)
        longest = _LONGEST_SECONDS * self._speed(device) if known else math.inf
        share = _SHARE if self._alike or device in self.seen else _UNSURE_SHARE
        return min(share * min(left, fair), longest)

    def _hinders(self, device: int, work: float, left: float, now: float) -> bool:
        """Whether the others would do all the rest sooner than this device that unit."""
        others = {n: self._speed(n) for n in self.devices if n != device}
        if not self.running or not others:
            return False
        running = sum(
            max(0.0, order.work - (now - order.begun) * self._speed(n) * bool(self.seen))
            for n, order in self.running.items()
        )
        rest = (left + running) / sum(others.values()) + work / max(others.values())
        return work / self._speed(device) > rest


class Coordinator:
    """Runs one pass; it computes nothing itself.

    A worker that ends, hangs or runs out of memory at every depth leaves the pass; its order goes
    back and others compute it.

    Args:
        workers: those that are gone take no part.
        begin: what they have to know of the pass.
        schedule: its units.
        sums: where gradients of a part go that have to be added up.
        done: called with each part that is done, and with what ``sums`` had returned for it.
        report: what happened.
        budgets: bytes that a part may take on each worker's device; None: what is free.
        steady: whether parts take as long as their work says; if not, each may take an hour.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        begin: Begin,
        schedule: Schedule,
        sums: Callable[[Any], Any],
        done: Callable[[Any, Any], None],
        report: PoolPass,
        budgets: Sequence[int | None] = (None,),
        steady: bool = True,
    ) -> None:
        self._workers, self._begin, self._schedule = list(workers), begin, schedule
        self._sums, self._done, self._report = sums, done, report
        self._budgets, self._steady = budgets, steady
        self._running = schedule.running
        self._targets: dict[int, Any] = {}
        # Seconds for a unit of work of each worker's last order, with all waiting.
        self._lasted: dict[int, float] = {}
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
            for number, worker in enumerate(self._workers):
                if worker.alive:
                    schedule.devices.add(number)
                    budget = self._budgets[min(number, len(self._budgets) - 1)]
                    if not worker.begin(self._begin, budget):
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
                    worker.end(End(self._begin.number))
            report.seconds = time.perf_counter() - self._began

    def _launch(self, number: int) -> None:
        """An order for an idle device, if there is one for it."""
        order = self._schedule.take(number, time.perf_counter())
        if order is None:
            return
        try:
            target = self._targets[number] = self._sums(order.part)
            sent = self._workers[number].compute(
                Compute(self._begin.number, order.index, order.part, target)
            )
        except Exception:
            # No memory for sums, say. Nobody waits for an answer to what was never sent.
            self._schedule.put_back(number)
            raise
        if not sent:
            self._lost(number, "its worker has ended")

    def _hear(self) -> None:
        """Take in what workers say; those that say nothing for too long are given up."""
        ends = {number: self._limit(number) + one.begun for number, one in self._running.items()}
        soonest = min(ends.values())
        seconds = None if math.isinf(soonest) else max(0.0, soonest - time.perf_counter())
        heard = listen({number: self._workers[number] for number in self._running}, seconds)
        # What is done first: a failure may end the pass.
        error: tuple[int, Failed] | None = None
        for number, answer in sorted(heard, key=lambda one: not isinstance(one[1], Done)):
            if answer is None:
                self._lost(number, "its worker has ended")
            elif answer.number != self._begin.number:
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

    def _limit(self, number: int) -> float:
        """Seconds after which a worker's order is taken from it."""
        if not self._lasted:
            return math.inf if len(self._running) == 1 else _HOUR
        if not self._steady:
            return _HOUR
        pace = self._lasted.get(number) or max(self._lasted.values())
        return max(_HUNG_SECONDS, _HUNG_TIMES * pace * self._running[number].work)

    def _finished(self, number: int, answer: Done) -> None:
        now = time.perf_counter()
        order = self._schedule.done(number, answer.seconds)
        assert answer.index == order.index, "another order was meant"
        self._lasted[number] = (now - order.begun) / max(1, order.work)
        began, shares = self._began, self._schedule.shares(order)
        self._report.ran += ran(
            number, shares, order.begun - began, now - began, answer.report, answer.seconds
        )
        self._done(order.part, self._targets.pop(number))

    def _lost(self, number: int, why: str, end: bool = True) -> None:
        """A device leaves the pass; its order goes back."""
        if end:
            self._workers[number].kill()
        self._schedule.lost(number)
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
                if answer is None or answer.number == self._begin.number:
                    self._schedule.put_back(number)

    def _give_up(self) -> NoReturn:
        done, all_ = len(self._report.ran), self._report.parts
        said = "; ".join(self._report.history) or "all had ended before, or were closed"
        message = f"no device is left after {done} of {all_} parts: {said}"
        if self._errors:
            raise OutOfMemoryError(f"{message}; {self._errors[-1]}")
        raise RuntimeError(message)


__all__ = ["Coordinator", "Order", "Schedule"]
