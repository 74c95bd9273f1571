"""Which parts a device gets next, and how many at once, by how quick it is.

Parts are small, so that devices end together; a call of several of them is quicker than several
calls. So a device takes a share of what it will do in all at once, then a share of what is then
left, and so on (Hummel, Schonberg and Flynn, "Factoring", 1992), as far as parts lie side by side.
A device that would still be at a part when the others could have done all the rest takes none.

A second order may wait at a device that is at its first, so that it need not wait for it. It counts
as not begun, and is taken back for a device that has nothing to do.

Devices that are alike have a home each: the parts that they take first, the same ones in every call
(Markatos and LeBlanc, "Using processor affinity in loop scheduling", 1994), because their workers
have the memory of those open and locked. What is left in other homes they take from its end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quorum_attention.execution.control.machine import Machine
from quorum_attention.pool.cut_anew import cut_anew

# The share of what a device will presumably do that it takes at once: where devices are alike, and
# where they may not be as quick as they are thought to be.
_SHARE_ALIKE, _SHARE = 0.8, 0.55
# And where nothing is known of them.
_SHARE_UNKNOWN = 0.4
# Devices that gain by long calls take all at once.
_SHARE_SURE = 1.001
# No order takes much longer, where paces are known: a device that is lost loses all of its order.
_LONGEST_SECONDS = 5.0
# Only of devices this much quicker another one may be in the way, and not for so few seconds.
_SLOW = 1.25
_SHORT_SECONDS = 0.01
# Up to here what is expected of a device says how long its orders are, and not what was seen: so
# that they have the same sizes from call to call.
_AS_EXPECTED = 1.5
# No order waits at a device that will do less than such a share of it.
_LEAST_AHEAD = 0.5


@dataclass(frozen=True, slots=True)
class Order:
    """Parts that a device computes at once.

    Attributes:
        part: all of them, as one.
        units: those that the machine knows.
        pairs: how much work it is.
        begun: when, in seconds; of one that waits, when it was made.
        near: the part and those beside it that the device will presumably take next, as one.
    """

    part: Any
    units: tuple[Any, ...]
    pairs: int
    begun: float
    near: Any


class Dispatcher:
    """Hands out the parts of a pass.

    Args:
        machine: of the pass; its groups are parts.
        pairs: how much work a part is.
        join: two parts as one; None where they are none. No function: parts stay as they are.
        paces: how long each device takes for a pair, relative to the others, as far as that is
            known beforehand.
        alike: whether devices may be taken to be equally quick.
        sure: whether those that are alike gain by long calls: each takes its home at once.
        new: seconds that the first order of a device may take beside computing, where it may have
            to open, compile or plan what it has not met before.
        timed: whether ``paces`` are seconds a pair, and not only relative to each other.
        homes: the device that should take each part; None: whoever comes first.
        usual: seconds a pair that are expected of devices, whatever was seen.
        cut: a part in at most so many pieces of equal work; None: parts stay as they are.
        cut_costs: seconds that pieces of a part may take beside computing.

    Attributes:
        orders: what devices are at, by number.
        queued: what waits for devices that are at something else; the machine does not know of it.
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
        homes: Mapping[Any, int] | None = None,
        usual: Mapping[int, float] | None = None,
        cut: Callable[[Any, int], Sequence[Any]] | None = None,
        cut_costs: float = 0.0,
    ) -> None:
        self._cut, self._cut_costs, self._lost_one = cut, cut_costs, False
        self._new, self._timed = dict(new or {}), timed
        self.spent: dict[int, tuple[float, int]] = {}
        self._machine, self._pairs, self._join = machine, pairs, join
        self._before, self._usual = dict(paces or {}), dict(usual or {})
        self._sure = alike and sure
        self._share = _SHARE_SURE if self._sure else _SHARE_ALIKE if alike else _SHARE
        self.paces: dict[int, float] = {}
        self._homes = homes or {}
        # What no device has, nor waits at one; by home.
        self._free: dict[int | None, deque[Any]] = {}
        # By what they are sorted: lately by size, and by where they were at the beginning.
        self._place: dict[Any, tuple[float, ...]] = {
            part: (float(at),) for at, part in enumerate(machine.queue.waiting)
        }
        self._left = 0
        self._give_back(machine.queue.waiting)
        self.orders: dict[int, Order] = {}
        self.queued: dict[int, Order] = {}

    def idle(self) -> list[int]:
        """Devices that have nothing to do, the quickest first."""
        found = [number for number in self._machine.devices if number not in self.orders]
        return sorted(found, key=self._pace)

    def take(self, device: int, now: float) -> Order | None:
        """What an idle device does next; None: nothing."""
        order = self._made(device, now, ahead=False)
        if order is not None:
            self._begin(device, order)
        return order

    def ahead(self, device: int, now: float) -> Order | None:
        """What waits from now on for a device that is at its order; None: nothing, as long as
        nobody knows how quick it is."""
        known = device in self.paces or self._timed or self._sure
        if not known or device in self.queued or device not in self.orders:
            return None
        # What is left after a loss may be few large parts: whoever is idle first begins with them.
        free = self._free.get(None, deque())
        sooner = self._sooner(device, now) if self._lost_one else 0
        if sooner >= max(1, len(free)):
            return None
        free.rotate(-sooner)
        order = self._made(device, now, ahead=True)
        free.rotate(sooner)
        if order is not None:
            self.queued[device] = order
        return order

    def _sooner(self, device: int, now: float) -> int:
        """How many devices will be idle before this one, with nothing that waits for them."""
        busy = self._busy(now)
        others = [n for n in self._machine.devices if n != device and n not in self.queued]
        return sum(busy.get(n, 0.0) < busy[device] for n in others)

    def behind(self, device: int, now: float) -> int | None:
        """The device whose waiting order would begin last, if it should be taken back because an
        idle device finds nothing else to do."""
        if not self.queued or any(self._free.values()):
            return None
        busy = self._busy(now)
        last = max(self.queued, key=lambda number: busy.get(number, 0.0))
        return None if self._hinders(device, now, self.queued[last].units[0]) else last

    def withdrawn(self, device: int) -> Order:
        """What waited for a device was taken back."""
        order = self.queued.pop(device)
        self._give_back(order.units)
        return order

    def done(self, device: int, now: float, worked: float | None = None, new: float = 0.0) -> Order:
        """A device has done its order.

        Args:
            worked: seconds that it was at it, as it says itself; None: since the order began.
            new: how many of them may have gone into what it had not met before.
        """
        order = self.orders.pop(device)
        seconds = now - order.begun if worked is None else worked
        new = max(new, self._new.pop(device, 0.0))
        before, pairs = self.spent.get(device, (0.0, 0))
        self.spent[device] = (before, pairs) if new else (before + seconds, pairs + order.pairs)
        if seconds > new:
            self.paces[device] = (seconds - new) / max(1, order.pairs)
        return order

    def go_on(self, device: int, now: float) -> Order | None:
        """A device begins with what waited for it, after the machine knows of what it has done."""
        order = self.queued.pop(device, None)
        if order is not None:
            order = replace(order, begun=now)
            self._begin(device, order)
        return order

    def lost(self, device: int) -> None:
        """A device is gone; its orders go back."""
        for orders in (self.orders, self.queued):
            order = orders.pop(device, None)
            if order is not None:
                self._give_back(order.units)
        self.paces.pop(device, None)

    def cut_anew(self, now: float) -> dict[Any, Sequence[Any]]:
        """After a device has left, if parts may be cut: from now on they are anybody's, the large
        ones first; and some are cut if the others would not end together (cut_anew.py).

        Returns:
            the pieces of parts that were cut; the machine knows of them.
        """
        if self._cut is None:
            return {}
        self._lost_one = True
        free = [unit for units in self._free.values() for unit in units]
        self._homes, self._free, self._left = {}, {}, 0
        self._place = {unit: (-self._size(unit), *at[-1:]) for unit, at in self._place.items()}
        self._give_back(free)
        devices = list(self._machine.devices)
        paces = {device: self._pace(device) for device in devices}
        costs = self._cut_costs
        if not (self.paces or self._timed):
            # Relative to each other only: nobody has done anything yet.
            known = all(device in self._usual for device in devices)
            paces = {device: self._usual[device] for device in devices} if known else paces
            costs = costs if known else 0.0
        busy = {
            device: sum(one[device].pairs for one in (self.orders, self.queued) if device in one)
            * paces[device]
            for device in devices
        }
        if self.paces:
            waits = {device: order.pairs * paces[device] for device, order in self.queued.items()}
            busy = {d: s + waits.get(d, 0.0) for d, s in self._busy(now).items() if d in paces}
        free = list(self._free.get(None, ()))
        found = cut_anew(free, self._pairs, self._cut, paces, busy, costs)
        for part, pieces in found.items():
            self._machine.divide(part, pieces)
            self._free[None].remove(part)
            self._left -= self._pairs(part)
            for number, piece in enumerate(pieces):
                place = self._place[part][-1] + number / len(pieces)
                self._place[piece] = -self._size(piece), place
            self._give_back(pieces)
        return found

    def _size(self, unit: Any) -> float:
        """How large it is, roughly: neighbours of about the same size stay beside each other."""
        return round(math.log2(1 + self._pairs(unit)))

    def _made(self, device: int, now: float, ahead: bool) -> Order | None:
        """An order from what is free."""
        home, own = self._source(device)
        free = self._free.get(home)
        if not free:
            return None
        first = free[0] if own else free[-1]
        if self.orders and self._hinders(device, now, first):
            return None
        most = self._most(device, now, free if own else ())
        if ahead and most < _LEAST_AHEAD * self._pairs(first):
            return None
        units, part = [free.popleft() if own else free.pop()], first
        while self._join is not None and free:
            joined = self._join(part, free[0]) if own else self._join(free[-1], part)
            if joined is None or self._pairs(joined) > most:
                break
            units.append(free.popleft() if own else free.pop())
            part = joined
        if not own:
            units.reverse()
        order = Order(part, tuple(units), self._pairs(part), now, self._near(part, home, own))
        self._left -= order.pairs
        return order

    def _source(self, device: int) -> tuple[int | None, bool]:
        """Where a device takes parts from, and whether from the beginning: its home, then the
        fullest one of others."""
        if not self._homes:
            return None, True
        if self._free.get(device):
            return device, True
        return max(self._free, key=lambda home: self._work(self._free[home])), False

    def _most(self, device: int, now: float, home: Iterable[Any]) -> float:
        """Pairs of an order, at most."""
        fair, longest = self._fair(device, now), self._longest(device)
        if not self._sure or not self._homes or not home:
            known = self.paces or self._before or self._share != _SHARE
            return min((self._share if known else _SHARE_UNKNOWN) * fair, longest)
        work = self._work(home)
        # Of equal lengths: calls of other sizes may be planned in another way.
        return _SHARE_SURE * work / max(1, math.ceil(work / longest - 1e-3))

    def _longest(self, device: int) -> float:
        """Pairs of an order that is not too long."""
        seen = self._pace(device) if self.paces or self._timed else None
        usual = self._usual.get(device) if self._sure else None
        if usual and (not seen or 1 / _AS_EXPECTED < seen / usual < _AS_EXPECTED):
            seen = usual
        return _LONGEST_SECONDS / seen if seen else math.inf

    def _near(self, part: Any, home: int | None, own: bool) -> Any:
        if home is None or not own or self._join is None:
            return part
        for other in self._free[home]:
            joined = self._join(part, other)
            if joined is None:
                break
            part = joined
        return part

    def _begin(self, device: int, order: Order) -> None:
        """Tell the machine."""
        self.orders[device] = order
        waiting = self._machine.queue.waiting
        for unit in reversed(order.units):
            if waiting[0] != unit:
                waiting.remove(unit)
                waiting.appendleft(unit)
        self._machine.start(device)
        for unit in order.units:
            launch = self._machine.next(device)
            assert launch is not None, "a part is waiting"
            assert launch.group == unit

    def _give_back(self, units: Iterable[Any]) -> None:
        for unit in units:
            self._left += self._pairs(unit)
            self._free.setdefault(self._homes.get(unit), deque()).append(unit)
        for home, free in self._free.items():
            self._free[home] = deque(sorted(free, key=self._place.__getitem__))

    def _work(self, parts: Iterable[Any]) -> int:
        return sum(self._pairs(part) for part in parts)

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
        """Pairs that a device will still begin, if all end together."""
        speeds = {number: 1 / self._pace(number) for number in self._machine.devices}
        begun = {number: seconds * speeds[number] for number, seconds in self._busy(now).items()}
        waits = sum(order.pairs for order in self.queued.values())
        every = self._left + waits + sum(begun.values())
        return every * speeds[device] / sum(speeds.values()) - begun.get(device, 0.0)

    def _hinders(self, device: int, now: float, part: Any) -> bool:
        """Whether quicker devices would do all the rest sooner than this one that part."""
        pace = self._pace(device)
        quicker = {n: self._pace(n) for n in self._machine.devices if self._pace(n) * _SLOW < pace}
        busy, work = self._busy(now), self._pairs(part)
        if not quicker or (self.paces and pace * work < _SHORT_SECONDS):
            return False
        speeds = sum(1 / each for each in quicker.values())
        begun = sum(busy.get(number, 0.0) / each for number, each in quicker.items())
        waits = sum(order.pairs for order in self.queued.values())
        # As if what is left could be cut at will, and a part beyond that.
        rest = (self._left + waits + begun) / speeds + work * min(quicker.values())
        return busy.get(device, 0.0) + pace * work > rest


__all__ = ["Dispatcher", "Order"]
