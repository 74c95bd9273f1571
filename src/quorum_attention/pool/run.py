"""A pass on a pool: the machine says which part comes next, workers compute it.

The coordinator computes nothing. A worker that ends, hangs or runs out of memory gives its part
back, and the others finish. Who the workers are and how one talks to them is not its matter: a
pool's are processes of this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.control.events import DeviceJoined, DeviceLost, GiveUp, UnitDone
from quorum_attention.execution.control.machine import Limits, Machine
from quorum_attention.pool.dispatch import Dispatcher, Order
from quorum_attention.pool.messages import Begun, Compute, Done, End, Failed
from quorum_attention.pool.report import PoolPass, ran
from quorum_attention.pool.workers import listen

# A worker hangs if a part takes so many times what its pace, or the pace of others, makes it; and
# at least so many seconds.
_HUNG_TIMES, _HUNG_SECONDS = 20.0, 60.0
_HOUR = 3600.0
# Seconds after which it is asked again whether workers have come, where some may.
_ASK_SECONDS = 0.5
_WHOLE: tuple[int, ...] = ()


class Work(Protocol):
    """A part of a pass, as far as the coordinator knows it."""

    def pairs(self, sizes: Any) -> int:
        """How much work it is."""


class Start(Protocol):
    """What workers have to know of a pass; ``Begin`` in a pool."""

    @property
    def number(self) -> int:
        """Of the pass."""

    @property
    def sizes(self) -> Any:
        """Of the call, for ``Work.pairs``."""


class Hand(Protocol):
    """A worker, as far as the coordinator knows it."""

    @property
    def alive(self) -> bool:
        """Whether it has not ended, nor been given up."""

    @property
    def label(self) -> str:
        """Its device, for people."""

    def send(self, message: object) -> bool:
        """Send a message; False if the worker is gone."""

    def kill(self) -> None:
        """End it at once."""


Said = Begun | Done | Failed | None
Listen = Callable[[Sequence[Any], "float | None"], Sequence[tuple[Any, Said]]]
Recruits = Callable[[bool], Sequence[Hand]]


class Coordinator:
    """Runs one pass.

    Args:
        workers: those of the pool; those that are gone take no part.
        begin: what they have to know of the pass.
        parts: of the call, in the order in which they should be begun.
        sums: where the gradients of a part's keys and values go, if they have to be added up.
        done: called with each part that is done, and with what ``sums`` had returned for it.
        report: what happened.
        listen: what workers say next, as ``workers.listen``.
        recruits: workers that have come since it was asked last; asked with True, when the last one
            is about to leave, it waits for one as long as one may come. None: nobody comes.
        join: two parts as one, which a worker computes at once; None where they are none. No
            function: parts stay as they are.
        paces: seconds a pair of workers by number, as far as they are known beforehand.
        alike, sure: whether they may be taken to be equally quick; whether they were, and gain by
            long calls.
        homes: the number of the worker that should take each part; None: whoever comes first.
        usual: seconds a pair that are expected of workers, whatever was seen.
        allowed: seconds that an order may take beside computing, by number, if its worker says that
            it was new to it.
        may_wait: whether a second order may be this part, and wait at its worker; None: none may.
        steady: whether parts take as long as their pairs say; if not, nothing is concluded from how
            long others took, and a worker has an hour for each.
        new: by number, seconds that a worker's first order may take beside computing.
        cut: a part in at most so many pieces, where a worker that leaves may have others' parts cut
            anew; None: parts stay as they are.
        cut_costs: seconds that pieces of a part may take beside computing.
        timed: whether ``paces`` are not only relative to each other.

    Attributes:
        spent: by number, seconds and pairs of what a worker has done, except such first orders.
    """

    def __init__(
        self,
        workers: Sequence[Hand],
        begin: Start,
        parts: Sequence[Any],
        sums: Callable[[Any], Any],
        done: Callable[[Any, Any], None],
        report: PoolPass,
        listen: Listen = listen,
        recruits: Recruits | None = None,
        join: Callable[[Any, Any], Any] | None = None,
        paces: Mapping[int, float] | None = None,
        alike: bool = False,
        sure: bool = False,
        new: Mapping[int, float] | None = None,
        timed: bool = False,
        steady: bool = True,
        homes: Mapping[Any, int] | None = None,
        usual: Mapping[int, float] | None = None,
        allowed: Mapping[int, float] | None = None,
        may_wait: Callable[[Any], bool] | None = None,
        cut: Callable[[Any, int], Sequence[Any]] | None = None,
        cut_costs: float = 0.0,
    ) -> None:
        self._steady, self._allowed, self._may_wait = steady, allowed or {}, may_wait
        self._workers, self._begin, self._parts = list(workers), begin, list(parts)
        self._sums, self._done, self._report = sums, done, report
        self._listen, self._recruits = listen, recruits
        alive = {number: 1 for number, worker in enumerate(workers) if worker.alive}
        self._machine = Machine(parts, _never, Limits(0, 0), alive)
        self._numbers = {part: number for number, part in enumerate(self._parts)}
        self._dispatch = Dispatcher(
            self._machine, lambda part: part.pairs(begin.sizes), join, paces, alike, sure, new,
            timed, homes, usual, cut, cut_costs,
        )  # fmt: skip
        self._running, self.spent = self._dispatch.orders, self._dispatch.spent
        self._may_cut = cut is not None
        self._targets: dict[int, Any] = {}
        # Seconds a pair of what each did last, with all that it had to wait for.
        self._lasted: dict[int, float] = {}
        self._errors: list[str] = []
        # What workers have said, and was not taken in yet.
        self._heard: list[tuple[Any, Said]] = []
        # Devices of which it is known that they have begun with their order.
        self._begun: set[int] = set()

    def run(self) -> None:
        """Run all parts.

        Raises:
            OutOfMemoryError: memory ran out on every device.
            RuntimeError: no worker is left; the message says what was done.
            Exception: what a worker raised.
        """
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[None]:
        """``run``, which stops after each answer; if it is not continued workers are ended."""
        self._began = time.perf_counter()
        try:
            for number in list(self._machine.devices):
                if not self._workers[number].send(self._begin):
                    self._lost(number, "its worker has ended")
            if not self._machine.devices and not self._machine.finished:
                self._give_up()
            while not self._machine.finished:
                self._join()
                self._launch()
                self._hear()
                yield
        except Exception:
            self._drain()
            raise
        except BaseException:
            self._stop()
            raise
        finally:
            for worker in self._workers:
                if worker.alive:
                    worker.send(End(self._begin.number))
            self._report.seconds = time.perf_counter() - self._began
            self._report.history += self._machine.history

    def _stop(self) -> None:
        """End the workers that compute: they would write into results that the caller has back."""
        for number in {*self._running, *self._dispatch.queued}:
            try:
                self._workers[number].kill()
            except KeyboardInterrupt:  # another one, while it waited for the first ones to end
                self._workers[number].kill()

    def _drain(self) -> None:
        """Let workers finish the parts they have, so that they can be used again."""
        limit = time.monotonic() + _HUNG_SECONDS
        for number in list(self._dispatch.queued):
            self._withdraw(number)
        try:
            while self._running and time.monotonic() < limit:
                # Others may have answered at the same time as the one whose error this is.
                heard, self._heard = self._heard, []
                for worker, answer in heard or self._listen(
                    [self._workers[n] for n in self._running], 1.0
                ):
                    if isinstance(answer, Begun) or self._is_old(answer):
                        continue
                    number = next(n for n in self._running if self._workers[n] is worker)
                    following = self._dispatch.queued.pop(number, None)
                    self._dispatch.lost(number)
                    if answer is None:
                        worker.kill()
                    elif following is not None:
                        self._running[number] = following  # it was at that already
        finally:
            self._stop()

    def _join(self, wait: bool = False) -> None:
        """Take in workers that have come."""
        for worker in self._recruits(wait) if self._recruits is not None else ():
            number = len(self._workers)
            self._workers.append(worker)
            self._report.devices.append(worker.label)
            if worker.send(self._begin):
                self._machine.on(DeviceJoined(number, 1))

    def _launch(self) -> None:
        """An order for each device that has none, and then one that waits for each that has."""
        for number in self._dispatch.idle():
            if number not in self._machine.devices:
                continue  # lost meanwhile
            now = time.perf_counter()
            behind = self._dispatch.behind(number, now)
            if behind is not None:
                self._withdraw(behind)
            order = self._dispatch.take(number, now)
            if order is not None and not self._send(number, order):
                self._lost(number, "its worker has ended")
        for number in list(self._running) if self._may_wait is not None else ():
            self._queue(number)

    def _send(self, number: int, order: Order) -> bool:
        """Send an order; False if its worker is gone."""
        try:
            return self._workers[number].send(self._message(order))
        except Exception:
            # No memory for sums, say. Nobody waits for an answer to what was never sent.
            self._dispatch.lost(number)
            raise

    def _message(self, order: Order) -> Compute:
        index = self._numbers[order.units[0]]
        target = self._targets[index] = self._sums(order.part)
        return Compute(self._begin.number, index, order.part, target, order.near)

    def _queue(self, number: int) -> None:
        """Have an order wait for a device that is at one, if there is one for it."""
        worker: Any = self._workers[number]
        if number not in self._begun or not getattr(worker, "may_wait", False):
            return
        order = self._dispatch.ahead(number, time.perf_counter())
        if order is None:
            return
        assert self._may_wait is not None
        waits = False
        try:
            waits = self._may_wait(order.part) and worker.queue(self._message(order))
        finally:
            if not waits:
                self._back(number)

    def _withdraw(self, number: int) -> bool:
        """Take back what waits for a device; False if its worker has begun with it."""
        worker: Any = self._workers[number]
        if number not in self._dispatch.queued or not worker.withdraw():
            return False
        self._back(number)
        return True

    def _back(self, number: int) -> None:
        order = self._dispatch.withdrawn(number)
        self._targets.pop(self._numbers[order.units[0]], None)

    def _hear(self) -> None:
        """Take in what workers say; those that say nothing for too long are given up."""
        numbers = {id(self._workers[number]): number for number in self._running}
        now = time.perf_counter()
        ends = {number: self._limit(number) + one.begun for number, one in self._running.items()}
        soonest = min(ends.values(), default=now)
        seconds = None if soonest == float("inf") else max(0.0, soonest - now)
        if self._recruits is not None:
            seconds = _ASK_SECONDS if seconds is None else min(seconds, _ASK_SECONDS)
        heard = self._listen([self._workers[n] for n in self._running], seconds)
        # What is done first: a failure may end the pass.
        self._heard = sorted(heard, key=lambda one: not isinstance(one[1], Done))
        while self._heard:
            worker, answer = self._heard.pop(0)
            number = numbers[id(worker)]
            if self._is_old(answer):
                continue
            if answer is None:
                self._lost(number, "its worker has ended")
            elif isinstance(answer, Failed):
                self._failed(number, answer)
            elif isinstance(answer, Begun):
                self._begun.add(number)
            else:
                self._finished(number, answer)
        if heard:
            return
        now = time.perf_counter()
        for number, end in ends.items():
            if number in self._running and end <= now:
                self._lost(number, f"no answer for {now - self._running[number].begun:.0f} s")

    def _is_old(self, answer: Said) -> bool:
        """Whether it is about an earlier pass, of which a second interrupt has left a worker."""
        return answer is not None and answer.number != self._begin.number

    def _limit(self, number: int) -> float:
        """Seconds after which a worker's part is taken from it."""
        if not self._lasted:
            return float("inf") if len(self._running) == 1 else _HOUR
        if not self._steady:
            return _HOUR
        pace = self._lasted.get(number) or max(self._lasted.values())
        return max(_HUNG_SECONDS, _HUNG_TIMES * pace * self._running[number].pairs)

    def _finished(self, number: int, answer: Done) -> None:
        now = time.perf_counter()
        new = self._allowed.get(number, 0.0) if answer.new else 0.0
        # What it had to wait for says nothing of its pace, nor what it opened.
        worked = answer.seconds - answer.opening if answer.seconds else None
        order = self._dispatch.done(number, now, worked, new)
        assert answer.index == self._numbers[order.units[0]], "another order was meant"
        self._begun.discard(number)
        self._lasted[number] = (now - order.begun) / max(1, order.pairs)
        for unit in order.units:
            self._machine.on(UnitDone(number, unit, _WHOLE))
        self._dispatch.go_on(number, now)
        shares = [(self._numbers[unit], unit.pairs(self._begin.sizes)) for unit in order.units]
        began = self._began
        self._report.ran += ran(
            number, shares, order.begun - began, now - began, answer.report, answer.seconds,
            answer.index, answer.opening,
        )  # fmt: skip
        self._done(order.part, self._targets.pop(answer.index))

    def _failed(self, number: int, answer: Failed) -> None:
        if answer.broken:
            self._lost(number, f"its device has failed ({answer.error})")
            return
        if not answer.memory:
            self._withdraw(number)
            self._dispatch.lost(number)
            there = RuntimeError(
                f"in the worker of {self._report.devices[number]}:\n{answer.trace}"
            )
            if isinstance(answer.error, BaseException):
                raise answer.error from there
            raise RuntimeError(answer.error) from there
        self._errors.append(str(answer.error))
        # The worker is well: it only has no part in this pass any more.
        self._lost(number, "out of memory at every depth", end=False)

    def _lost(self, number: int, why: str, end: bool = True) -> None:
        """A device leaves the pass; its orders go back."""
        self._begun.discard(number)
        worker = self._workers[number]
        # One that has failed takes nothing that waits, one that is gone no more.
        self._withdraw(number)
        self._dispatch.lost(number)
        if end:
            worker.kill()
        if len(self._machine.devices) == 1:
            self._join(wait=True)
        order = self._machine.on(DeviceLost(number))
        self._report.history.append(f"{self._report.devices[number]}: {why}")
        if isinstance(order, GiveUp) or (not self._machine.devices and not self._machine.finished):
            self._give_up()
        if self._may_cut:
            self._cut_anew()

    def _cut_anew(self) -> None:
        """Cut what nobody has begun, so that those that are left end together."""
        for number in list(self._dispatch.queued):
            self._withdraw(number)
        for part, pieces in self._dispatch.cut_anew(time.perf_counter()).items():
            # The first piece has the part's number, so that numbers have no gaps.
            self._numbers[pieces[0]] = self._numbers.pop(part)
            for piece in pieces[1:]:
                self._numbers[piece] = len(self._parts)
                self._parts.append(piece)
            self._report.parts += len(pieces) - 1

    def _give_up(self) -> NoReturn:
        done, all_ = len(self._report.ran), len(self._parts)
        said = "; ".join(self._report.history) or "all had ended before, or were closed"
        message = f"no device is left after {done} of {all_} parts: {said}"
        if self._errors:
            raise OutOfMemoryError(f"{message}; {self._errors[-1]}")
        raise RuntimeError(message)


def _never() -> NoReturn:
    raise AssertionError("a pool's machine is not told of a lack of memory")


__all__ = ["Coordinator"]
