"""Which parts a device gets next, and how many at once, by how quick it is.

Parts are small, so that devices end together; a call of several of them is quicker than several
calls. So a device takes a share of what it will do in all at once, then a share of what is then
left, and so on (Hummel, Schonberg and Flynn, "Factoring", 1992), as far as parts lie side by side.
A device that would still be at a part when the others could have done all the rest takes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quorum_attention.execution.control.machine import Machine

# The share of what a device will presumably do that it takes at once: where devices are alike, and
# where they may not be as quick as they are thought to be.
_SHARE_ALIKE, _SHARE = 0.8, 0.55
# Devices that were as quick as each other before take all at once: a call that copies beside its
# kernels waits for its first and for its last copies.
_SHARE_SURE = 1.001
# No order takes much longer, where paces are known: a device that is lost loses all of its order.
_LONGEST_SECONDS = 5.0
# Only of devices this much quicker another one may be in the way, and not for so few seconds.
_SLOW = 1.25
_SHORT_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Order:
    """Parts that a device computes at once.

    Attributes:
        part: all of them, as one.
        units: those that the machine knows.
        pairs: how much work it is.
        begun: when, in seconds.
    """

    part: Any
    units: tuple[Any, ...]
    pairs: int
    begun: float


class Dispatcher:
    """Hands out the parts of a pass.

    Args:
        machine: of the pass; its groups are parts.
        pairs: how much work a part is.
        join: two parts as one; None where they are none. No function: parts stay as they are.
        paces: how long each device takes for a pair, relative to the others, as far as that is
            known beforehand.
        alike: whether devices may be taken to be equally quick.
        sure: whether they were, and gain by long calls.
        new: seconds that the first order of a device may take beside computing, where it may have
            to open, compile or plan what it has not met before.
        timed: whether ``paces`` are seconds a pair, and not only relative to each other.

    Attributes:
        orders: what devices are at, by number.
        paces: seconds a pair, as seen in this pass.
        spent: seconds and pairs of all orders that a device has done, except the first of a new
            one.
    """

    def __init__(
        self,
        machine: Machine,
        pairs: Callable[[Any], int],
        join: Callable[[Any, Any], Any] | None = None,
        paces: Mapping[int, float] | None = None,
        alike: bool = False,
        sure: bool = False,
        new: Mapping[int, float] | None = None,
        timed: bool = False,
    ) -> None:
        self._new, self._timed = dict(new or {}), timed
        self.spent: dict[int, tuple[float, int]] = {}
        self._machine, self._pairs, self._join = machine, pairs, join
        self._before = dict(paces or {})
        self._share = _SHARE_SURE if alike and sure else _SHARE_ALIKE if alike else _SHARE
        self.paces: dict[int, float] = {}
        self._left = sum(pairs(part) for part in machine.queue.waiting)
        self.orders: dict[int, Order] = {}

    def idle(self) -> list[int]:
        """Devices that have nothing to do, the quickest first."""
        found = [number for number in self._machine.devices if number not in self.orders]
        return sorted(found, key=self._pace)

    def take(self, device: int, now: float) -> Order | None:
        """What an idle device does next; None: nothing."""
        waiting = self._machine.queue.waiting
        if not waiting or (self.orders and self._hinders(device, now)):
            return None
        most = self._share * self._fair(device, now)
        if self.paces or self._timed:
            most = min(most, _LONGEST_SECONDS / self._pace(device))
        self._machine.start(device)
        units = [self._next(device)]
        part = units[0]
        while self._join is not None and waiting:
            joined = self._join(part, waiting[0])
            if joined is None or self._pairs(joined) > most:
                break
            units.append(self._next(device))
            part = joined
        order = Order(part, tuple(units), self._pairs(part), now)
        self._left -= order.pairs
        self.orders[device] = order
        return order

    def done(self, device: int, now: float) -> Order:
        """A device has done its order."""
        order = self.orders.pop(device)
        seconds, new = now - order.begun, self._new.pop(device, 0.0)
        before, pairs = self.spent.get(device, (0.0, 0))
        self.spent[device] = (before, pairs) if new else (before + seconds, pairs + order.pairs)
        if seconds > new:
            self.paces[device] = (seconds - new) / max(1, order.pairs)
        return order

    def lost(self, device: int) -> None:
        """A device is gone; its order goes back."""
        order = self.orders.pop(device, None)
        if order is not None:
            self._left += order.pairs
        self.paces.pop(device, None)

    def seconds(self, device: int) -> float | None:
        """How long its order should take; None where no pace is known."""
        return self._pace(device) * self.orders[device].pairs if self.paces else None

    def _next(self, device: int) -> Any:
        launch = self._machine.next(device)
        assert launch is not None, "a part is waiting"
        return launch.group

    def _pace(self, device: int) -> float:
        found = self.paces.get(device)
        if found:
            return found
        usual = sum(self._before.values()) / len(self._before) if self._before else 1.0
        # How much slower, or quicker, the devices are that are seen than they were thought to be.
        scales = [pace / self._before.get(number, usual) for number, pace in self.paces.items()]
        scale = sum(scales) / len(scales) if scales else 1.0
        return self._before.get(device, usual) * scale

    def _busy(self, now: float) -> dict[int, float]:
        """Seconds that each device will still be at its order."""
        return {
            device: max(0.0, order.begun + self._pace(device) * order.pairs - now)
            if self.paces
            else self._pace(device) * order.pairs
            for device, order in self.orders.items()
        }

    def _fair(self, device: int, now: float) -> float:
        """Pairs that an idle device will do, if all end together."""
        speeds = {number: 1 / self._pace(number) for number in self._machine.devices}
        begun = sum(seconds * speeds[number] for number, seconds in self._busy(now).items())
        return (self._left + begun) * speeds[device] / sum(speeds.values())

    def _hinders(self, device: int, now: float) -> bool:
        """Whether quicker devices would do all the rest sooner than this one its next part."""
        pace = self._pace(device)
        quicker = {n: self._pace(n) for n in self._machine.devices if self._pace(n) * _SLOW < pace}
        busy, work = self._busy(now), self._pairs(self._machine.queue.waiting[0])
        if not quicker or (self.paces and pace * work < _SHORT_SECONDS):
            return False
        speeds = sum(1 / each for each in quicker.values())
        begun = sum(busy.get(number, 0.0) / each for number, each in quicker.items())
        # As if what is left could be cut at will, and a part beyond that.
        rest = (self._left + begun) / speeds + work * min(quicker.values())
        return pace * work > rest


__all__ = ["Dispatcher", "Order"]
