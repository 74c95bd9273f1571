"""Controllers for tests: cuts without a call, and a device that only says what happens
to it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, wraps

import numpy as np

from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.execution.control.controller import GroupTasks, RecoveryController
from quorum_attention.execution.control.visits import Visit

DEEPEN_BY = 7


def check_every_event() -> None:
    """From now on the controllers of this process are checked after everything they are
    told."""
    for name, groups in (("done", False), ("out_of_memory", True), ("headroom", True)):
        setattr(
            RecoveryController,
            name,
            _checked(getattr(RecoveryController, name), groups),
        )


def _checked(event: Callable[..., None], groups: bool) -> Callable[..., None]:
    @wraps(event)
    def checked(controller: RecoveryController, *told: object) -> None:
        event(controller, *told)
        check(controller, groups=groups)

    return checked


def check(controller: RecoveryController, *, groups: bool = False) -> None:
    """Raise AssertionError if a unit would be lost or run twice, or a limit is
    exceeded.

    Args:
        groups: whether to check each group too.
    """
    depth = controller.depth
    assert controller.n_cap >= 1, f"{controller.n_cap} slots"
    assert controller.coarsenings <= 2, (
        "memory that comes and goes makes no call swing for ever"
    )
    if not controller.groups_are_whole:
        cuts = controller.levels
        assert cuts.depth <= depth <= max(cuts.depth, cuts.deepest), f"depth {depth}"
    places = Counter([*controller.waiting, *controller.begun])
    assert len(places) + controller.n_finished == controller.n_groups, (
        "a head group is lost"
    )
    assert max(places.values(), default=1) == 1, "a head group is in two places"
    for one in controller.begun.values() if groups else ():
        check_group(one)


def check_group(one: GroupTasks) -> None:
    """Raise AssertionError if completed tasks and tasks left of a group have pairs in
    common."""
    assert one.remaining, "a group without tasks left is finished"
    assert not one.remaining.keys() & one.completed.keys(), (
        "a completed unit would run again"
    )
    every = one.remaining.keys() | one.completed.keys()
    for path in every:
        above = next((path[:n] for n in range(len(path)) if path[:n] in every), None)
        assert above is None, (
            f"task {path} is part of task {above}, which is there as well"
        )


class Cuts:
    """The tasks of a decomposition, at its depth, and deeper."""

    def __init__(self, shape: Decomposition, deepest: int = 3, n_cap: int = 1) -> None:
        self.shape, self.depth, self.deepest, self.n_cap = (
            shape,
            shape.depth,
            deepest,
            n_cap,
        )
        self.shapes: dict[int, Decomposition] = {}
        self.known: dict[int, list[Task]] = {}
        self.deeper: dict[tuple[int, ...], list[Task]] = {}

    def at(self, depth: int) -> Decomposition:
        if depth not in self.shapes:
            more = (DEEPEN_BY,) * (depth - self.shape.depth)
            self.shapes[depth] = replace(
                self.shape, levels=(*self.shape.levels, *more)[:depth]
            )
        return self.shapes[depth]

    def tasks(self, depth: int) -> list[Task]:
        if depth not in self.known:
            self.known[depth] = list(self.at(depth).tasks())
        return self.known[depth]

    def split_tasks(self, tasks: Sequence[Task], depth: int) -> list[Task]:
        shape = self.at(depth)
        for task in tasks:
            if task.path not in self.deeper:
                paths = ((*task.path, i) for i in range(DEEPEN_BY))
                self.deeper[task.path] = [shape.task(path) for path in paths]
        return [part for task in tasks for part in self.deeper[task.path]]


def controller(
    n_cap: int = 2,
    depth: int = 1,
    floor: int = 1,
    deepest: int = 3,
    *,
    groups: Iterable[str] = "ab",
    cuts: Cuts | None = None,
    coarsenings: int = 0,
    **more,
) -> RecoveryController:
    """A controller as it is after some recoveries."""
    cuts = cuts or Cuts(Decomposition(84, (7,) * floor, "balanced"), deepest)
    made = RecoveryController(groups, cuts, n_cap, **more)
    made.depth, made.coarsenings = depth, coarsenings
    return made


SHAPES = [
    Decomposition(n, levels, layout, 8)
    for n, levels in [
        (200, ()),
        (90, (3,)),
        (210, (7,)),
        (97, (7,)),
        (150, (3, 3)),
        (240, (13,)),
    ]
    for layout in ("balanced", "aligned")
]


@cache
def cuts_of(shape: Decomposition) -> Cuts:
    return Cuts(shape)


@cache
def pairs_of(shape: Decomposition, path: tuple[int, ...]) -> np.ndarray:
    """Which pairs a task of the shape, or a deeper one, computes: (n_tokens, n_tokens),
    in bytes of 0 or 1."""
    task = cuts_of(shape).at(len(path)).task(path)
    tokens = [t for start, stop, _ in task.runs for t in range(start, stop)]
    pairs = np.zeros((shape.n_tokens, shape.n_tokens), dtype=bool)
    pairs[np.ix_(tokens, tokens)] = task.mask()
    return pairs.view(np.uint8)


class History:
    """One pass on a device with room for so many tokens of slots, everything that
    happens drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.shape = draw.choice(SHAPES)
        self.cuts = copy(cuts_of(self.shape))
        self.groups = [f"group {i}" for i in range(draw.choice([1, 2, 4, 8]))]
        most = 4 * self.shape.max_task_tokens
        self.room = draw.randint(most // 8, most)
        self.slots, self.in_flight = 0, list[tuple[str, Visit]]()
        depth = self.shape.depth
        self.cuts.deepest = depth + draw.choice([0, 1, 1, 2 - min(1, depth)])
        self.cuts.n_cap = draw.randint(1, 2)
        self.controller = RecoveryController(
            self.groups, None if draw.random() < 0.3 else self.cuts, draw.randint(1, 4),
            fallback=lambda: (self.cuts, "too large", "cut"),
        )  # fmt: skip
        self.pairs = {
            g: np.zeros((self.shape.n_tokens,) * 2, np.uint8) for g in self.groups
        }
        self.completed: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.seen: Counter[str] = Counter()
        self.failures = draw.choice([0.0, 0.01, 0.05, 0.1])
        self.end = ""

    def run(self) -> None:
        while not self.end:
            if self.draw.random() < self.failures:
                self._out_of_memory()
            else:
                self._turn()
            if self.controller.finished:
                self.end = "finished"
        for group, pairs in self.pairs.items():
            assert pairs.max(initial=0) <= 1, f"a pair of {group} was computed twice"
            if self.end == "finished":
                assert pairs.min(initial=1) == 1, f"a pair of {group} was lost"

    def _tokens(self, depth: int) -> int:
        return self.cuts.at(depth).max_task_tokens

    def _turn(self) -> None:
        """One step: begin an attempt, take a unit, or be done with one."""
        here = self.controller
        if not self.slots:
            self.slots = here.start()
            if self.slots * self._tokens(here.depth) > self.room:
                self._out_of_memory()
        elif len(self.in_flight) < self.slots:
            headroom = False
            if here.between_groups and here.may_coarsen:
                headroom = 2 * here.n_cap * self._tokens(here.depth - 1) <= self.room
            unit = None if headroom else here.next()
            if unit is not None:
                assert unit[1].task.n_tokens <= self._tokens(here.depth), "fits a slot"
                self.in_flight.append(unit)
            elif headroom:
                while self.in_flight:
                    self._done()
                here.headroom()
                self.seen["coarsened"] += 1
                self.slots = 0
            elif not self.in_flight:
                self.slots = 0
        if self.in_flight and self.draw.random() < 0.5:
            self._done()

    def _done(self) -> None:
        group, visit = self.in_flight.pop(self.draw.randrange(len(self.in_flight)))
        path = visit.task.path
        self.completed[group, path] += 1
        assert self.completed[group, path] == 1, f"{path} of {group} ran again"
        self.pairs[group] += pairs_of(self.shape, path)
        self.controller.done(group, path)

    def _out_of_memory(self) -> None:
        here = self.controller
        before = here.n_cap, here.depth, here.groups_are_whole
        here.out_of_memory()
        self.slots = 0
        self.in_flight.clear()
        if here.given_up:
            assert before == (here.n_cap, here.depth, here.groups_are_whole)
            self.end = "gave up"
        elif before[2]:
            self.seen["fell back"] += 1
        elif here.n_cap < before[0]:
            self.seen["one slot less"] += 1
        else:
            assert here.depth == before[1] + 1
            self.seen["deepened"] += 1
            if self.draw.random() < 0.5:
                # Whoever else had the memory lets go of it.
                self.room *= 4

    def told(self) -> str:
        """What a failure is reported with."""
        return f"{self.shape}, {self.controller.history}"
