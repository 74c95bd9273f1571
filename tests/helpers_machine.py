"""Machines for tests: cuts without a call, and devices that only say what happens to them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.execution.control.events import (
    Continue,
    Deepen,
    DeviceJoined,
    DeviceLost,
    Event,
    GiveUp,
    Headroom,
    Launch,
    OutOfMemory,
    Overflow,
    PlanAnew,
    Repeat,
    Requeue,
    UnitDone,
)
from quorum_attention.execution.control.machine import Fallback, Limits, Machine

DEEPEN_BY = 7


class Cuts:
    """The tasks of a decomposition, at its depth, and deeper."""

    def __init__(self, shape: Decomposition) -> None:
        self.shape = shape
        self.shapes: dict[int, Decomposition] = {}
        self.known: dict[int, list[Task]] = {}
        self.deeper: dict[tuple[int, ...], list[Task]] = {}

    def at(self, depth: int) -> Decomposition:
        if depth not in self.shapes:
            more = (DEEPEN_BY,) * (depth - self.shape.depth)
            self.shapes[depth] = replace(self.shape, levels=(*self.shape.levels, *more)[:depth])
        return self.shapes[depth]

    def tasks(self, depth: int) -> list[Task]:
        if depth not in self.known:
            self.known[depth] = list(self.at(depth).tasks())
        return self.known[depth]

    def further(self, tasks: Sequence[Task], depth: int) -> list[Task]:
        shape = self.at(depth)
        for task in tasks:
            if task.path not in self.deeper:
                paths = ((*task.path, i) for i in range(DEEPEN_BY))
                self.deeper[task.path] = [shape.task(path) for path in paths]
        return [part for task in tasks for part in self.deeper[task.path]]


def machine(
    n_cap: int | Mapping[int, int] = 2,
    depth: int = 1,
    floor: int = 1,
    deepest: int = 3,
    *,
    groups: Iterable[str] = "ab",
    cuts: Cuts | None = None,
    coarsenings: int = 0,
    **more,  # type: ignore[no-untyped-def]
) -> Machine:
    """A machine with devices 0 and on, as it is after some recoveries."""
    n_caps = {0: n_cap} if isinstance(n_cap, int) else n_cap
    cuts = cuts or Cuts(Decomposition(84, (7,) * floor, "balanced"))
    made = Machine(groups, cuts, Limits(floor, deepest, **more), n_caps)
    for here in made.devices.values():
        here.depth, here.coarsenings = depth, coarsenings
    return made


def through(
    made: Machine, n: int | None = None, device: int = 0
) -> list[tuple[str, tuple[int, ...]]]:
    """Run ``n`` units of ``device``, or all there are, one after the other; which they were."""
    units = []
    while n is None or len(units) < n:
        launch = made.next(device)
        if launch is None:
            break
        units.append((launch.group, launch.visit.task.path))
        made.on(UnitDone(device, *units[-1]))
    return units


SHAPES = [
    Decomposition(n, levels, layout, 8)
    for n, levels in [(200, ()), (90, (3,)), (210, (7,)), (97, (7,)), (150, (3, 3)), (240, (13,))]
    for layout in ("balanced", "aligned")
]


@cache
def cuts_of(shape: Decomposition) -> Cuts:
    return Cuts(shape)


@cache
def pairs_of(shape: Decomposition, path: tuple[int, ...]) -> np.ndarray:
    """Which pairs a task of the shape, or a deeper one, computes: (n_tokens, n_tokens), in bytes of
    0 or 1."""
    task = cuts_of(shape).at(len(path)).task(path)
    tokens = [t for start, stop, _ in task.runs for t in range(start, stop)]
    pairs = np.zeros((shape.n_tokens, shape.n_tokens), dtype=bool)
    pairs[np.ix_(tokens, tokens)] = task.mask()
    return pairs.view(np.uint8)


@dataclass
class FakeDevice:
    """Has room for so many tokens of slots; ``speed`` is how often it is its turn.

    ``idle``: there was nothing left for it to begin. Only an event that may bring something back
    wakes it.
    """

    room: int
    speed: float
    slots: int = 0
    in_flight: list[Launch] = field(default_factory=list)
    waits_for_headroom: bool = False
    idle: bool = False


class History:
    """One pass on fake devices, everything that happens drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.shape = draw.choice(SHAPES)
        self.cuts = cuts_of(self.shape)
        self.groups = [f"group {i}" for i in range(draw.choice([1, 2, 4, 8, 16]))]
        self.devices = {i: self._device() for i in range(draw.choice([1, 1, 2, 3, 5, 8]))}
        depth = self.shape.depth
        deepest = depth + draw.choice([0, 1, 1, 2 - min(1, depth)])
        limits = Limits(depth, deepest)
        caps = {i: draw.randint(1, 4) for i in self.devices}
        whole = draw.random() < 0.3
        instead = Fallback(self.cuts, limits, draw.randint(1, 2), "too large", "cut")
        cuts = (lambda: instead) if whole else self.cuts
        first = replace(limits, guessed=whole and len(self.groups) == 1 and draw.random() < 0.5)
        self.machine = Machine(self.groups, cuts, first, caps)
        self.pairs = {g: np.zeros((self.shape.n_tokens,) * 2, np.uint8) for g in self.groups}
        self.completed: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.seen: Counter[str] = Counter()
        self.failures = draw.choice([0.0, 0.0, 0.01, 0.05])
        self.end = ""

    def _device(self) -> FakeDevice:
        most = 4 * self.shape.max_task_tokens
        return FakeDevice(self.draw.randint(most // 8, most), self.draw.choice([1, 2, 8]))

    def run(self) -> None:
        while not self.end:
            if self.draw.random() < self.failures:
                self._mishap(self.draw.choice(list(self.devices)))
            else:
                able = {n: device.speed for n, device in self.devices.items() if not device.idle}
                assert able, "units are left that no device begins"
                (number,) = self.draw.choices(list(able), able.values())
                self._turn(number, self.devices[number])
            if self.machine.finished:
                self.end = "finished"
        for group, pairs in self.pairs.items():
            assert pairs.max(initial=0) <= 1, f"a pair of {group} was computed twice"
            if self.end == "finished":
                assert pairs.min(initial=1) == 1, f"a pair of {group} was lost"

    def _tokens(self, depth: int) -> int:
        return self.cuts.at(depth).max_task_tokens

    def _mishap(self, number: int) -> None:
        kind = self.draw.choice(["memory", "overflow", "lost", "joined"])
        device = self.devices[number]
        if kind == "memory":
            self._told(OutOfMemory(number, "by chance"))
        elif kind == "overflow" and device.in_flight:
            launch = self.draw.choice(device.in_flight)
            path = launch.visit.task.path
            order: object = None
            for _ in range(4):
                assert not isinstance(order, Continue)
                order = self._told(Overflow(number, launch.group, path, {(0, 0): 3, (0, 1): 2}))
                if not isinstance(order, Repeat) or self.draw.random() < 0.5:
                    return
            raise AssertionError("an overflow goes on for ever")
        elif kind == "lost":
            self._told(DeviceLost(number))
        elif kind == "joined" and len(self.devices) < 8:
            new = max(self.devices) + 1
            self.devices[new] = self._device()
            self._told(DeviceJoined(new, self.draw.randint(1, 4)))

    def _turn(self, number: int, device: FakeDevice) -> None:
        """One step of a device: begin an attempt, take a unit, or be done with one."""
        here = self.machine.devices[number]
        if not device.slots:
            device.slots = self.machine.start(number)
            if not here.groups:
                device.slots, device.idle = 0, True
            elif device.slots * self._tokens(here.depth) > device.room:
                self._told(OutOfMemory(number, "no room for slots"))
        elif device.waits_for_headroom and not device.in_flight:
            self._told(Headroom(number))
            device.slots, device.waits_for_headroom = 0, False
        elif len(device.in_flight) < device.slots and not device.waits_for_headroom:
            if self.machine.between_groups(number) and self.machine.may_coarsen(number):
                coarser = here.n_cap * self._tokens(here.depth - 1)
                device.waits_for_headroom = 2 * coarser <= device.room
            if not device.waits_for_headroom:
                launch = self.machine.next(number)
                if launch is None and not device.in_flight:
                    device.slots = 0
                elif launch is not None:
                    assert launch.visit.task.n_tokens <= self._tokens(here.depth), "fits a slot"
                    device.in_flight.append(launch)
        if device.in_flight and self.draw.random() < 0.5:
            done = device.in_flight.pop(self.draw.randrange(len(device.in_flight)))
            self._done(number, done.group, done.visit.task.path)

    def _done(self, number: int, group: str, path: tuple[int, ...]) -> None:
        self.completed[group, path] += 1
        assert self.completed[group, path] == 1, f"{path} of {group} ran again"
        self.pairs[group] += pairs_of(self.shape, path)
        self._told(UnitDone(number, group, path))

    def _told(self, event: Event) -> object:
        order = self.machine.on(event)
        if not isinstance(event, UnitDone):
            for device in self.devices.values():
                device.idle = False
        self.seen[type(order).__name__] += 1
        if isinstance(order, (GiveUp, PlanAnew)):
            self.end = "gave up" if isinstance(order, GiveUp) else "planned anew"
            guessed = self.machine.limits.guessed and isinstance(event, OutOfMemory)
            assert isinstance(order, PlanAnew) == guessed
            assert self.machine.end == order
        elif isinstance(order, Requeue):
            del self.devices[event.device]
        elif isinstance(event, OutOfMemory):
            device = self.devices[event.device]
            device.slots = 0
            device.in_flight.clear()
            if isinstance(order, Deepen) and self.draw.random() < 0.5:
                # Whoever else had the memory lets go of it.
                device.room *= 4
        return order

    def told(self) -> str:
        """What a failure is reported with."""
        return f"{self.shape}, {self.machine.history}"
