"""The recovery controller: what runs next, and what to do about failures (paper, Section 3.4).

It is told what happens, and decides. It allocates nothing and never waits, so every history of
events can be tested without a device.

    out of memory, whole groups  -> groups that are not done are cut into tasks, for slots
    out of memory, n_cap > 1     -> units in flight return to the queue, n_cap - 1
    out of memory, n_cap = 1     -> the tasks left are cut one level further
    ... and no finer level       -> give up
    headroom after a recovery    -> groups that are not begun are cut one level less
    the user chose the depth     -> give up at the first failure

No completed unit runs again.

The paper coarsens once all tasks are resident and memory is left. Here two slots saturate a
device, so all tasks are never resident. Instead *headroom* is measured: free memory would hold the
coarser slots twice. Only a level that a recovery added is taken back, at most twice a pass, so that
free memory that comes and goes cannot make a pass alternate between depths for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from quorum_attention.decomposition import Task
from quorum_attention.decomposition.decomposition import tokens_of
from quorum_attention.execution.control.visits import Visit, visits
from quorum_attention.sizes import counted

if TYPE_CHECKING:
    from quorum_attention.execution.schedule import Cutting

Path = tuple[int, ...]
# A head group; the controller only compares them.
Group: TypeAlias = Any


# The task of a head group that is not cut: the whole group is one unit.
WHOLE = Task((), ())
_WHOLE_VISIT = Visit(WHOLE, (), (), (), (), ())
MOST_COARSENINGS = 2


@dataclass(slots=True, eq=False)
class GroupTasks:
    """A head group that was begun.

    Attributes:
        depth: the depth of the tasks left.
        left: the tasks that are not done, by path, in order.
        completed: the tasks that are done, by path.
        is_level: whether its tasks are all tasks of one depth, none of them cut further since.
    """

    group: Group
    depth: int
    left: dict[Path, Task]
    completed: dict[Path, Task] = field(default_factory=dict)
    is_level: bool = True


class RecoveryController:
    """Owns the queue of one pass.

    The pass works in attempts: ``start``, then ``next`` and ``done`` until no unit is left, or
    until memory runs out or there is headroom.

    Args:
        groups: the head groups, in order.
        cuts: the tasks that a group is cut into; None: units are whole groups.
        n_cap: most slots.
        pinned: whether the user chose the depth: failures are then reported, not recovered from.
        fallback: called when memory runs out for whole groups: the tasks that they are cut into
            then; and in words what failed, and what is done instead.

    Attributes:
        depth: levels that the next groups are cut into.
        coarsenings: how often a level was taken back.
        waiting: groups that are not begun, in order.
        begun: groups that are begun and not finished, in order.
        n_finished: how many groups are done.
        units_done: how many units are done.
        n_slots: slots of this attempt.
        history: one line for each recovery, for reports and error messages.
        given_up: where memory ran out and why there is no recovery; "" as long as there is.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        cuts: Cutting | None,
        n_cap: int,
        *,
        pinned: bool = False,
        fallback: Callable[[], tuple[Cutting, str, str]] | None = None,
    ) -> None:
        self._cuts, self._fallback, self._pinned = cuts, fallback, pinned
        self.n_cap, self.depth, self.coarsenings = n_cap, 0 if cuts is None else cuts.depth, 0
        self.waiting: deque[Group] = deque(groups)
        self.begun: dict[Group, GroupTasks] = {}
        self.n_groups, self.n_finished = len(self.waiting), 0
        self.units_done, self.n_slots = 0, n_cap
        self.history: list[str] = []
        self.given_up = ""
        # Of this attempt: groups begun before it, the group whose units were given last (None
        # before the first), its visits that are not given yet, and whether state may be carried
        # from one slot to the next.
        self._ahead: list[GroupTasks] = []
        self._current: Group | None = None
        self._visits: deque[Visit] = deque()
        self._carry = False
        # Visits of all tasks of a depth, worked out once for all groups.
        self._level_visits: dict[tuple[int, bool], list[Visit]] = {}

    @property
    def cuts(self) -> Cutting:
        """The tasks that groups are cut into."""
        assert self._cuts is not None, "groups are whole"
        return self._cuts

    @property
    def groups_are_whole(self) -> bool:
        """Whether each group is one unit."""
        return self._cuts is None

    @property
    def finished(self) -> bool:
        """Whether every unit is done."""
        return self.n_finished == self.n_groups

    @property
    def units_left(self) -> int:
        """Units that are not done; groups not begun count as cut to the present depth."""
        each = 1 if self._cuts is None or not self.waiting else len(self.cuts.tasks(self.depth))
        return sum(len(one.left) for one in self.begun.values()) + len(self.waiting) * each

    @property
    def groups_left(self) -> list[Group]:
        """Head groups that are not done, in order."""
        return [*self.begun, *self.waiting]

    @property
    def may_coarsen(self) -> bool:
        """Whether ``headroom`` would take back a level."""
        recovered = self._cuts is not None and self.depth > self._cuts.depth
        return recovered and not self._pinned and self.coarsenings < MOST_COARSENINGS

    @property
    def between_groups(self) -> bool:
        """Whether the next unit begins a group, but not the first of an attempt."""
        given = self._current is not None and not self._visits
        return given and not self._ahead and bool(self.waiting)

    @property
    def where(self) -> str:
        """The first unit that is not done, in words."""
        path = next((path for one in self.begun.values() for path in one.left), ())
        return (
            f"task {path or '()'} ({counted(self.n_groups - self.n_finished, 'head group')} to go)"
        )

    def start(self) -> int:
        """Begin an attempt; returns how many slots it should use."""
        if not self.begun:
            self._take()
        n_slots = 1 if self.groups_are_whole else min(self.n_cap, max(1, self.units_left))
        self._ahead, self._current, self._visits = list(self.begun.values()), None, deque()
        self.n_slots, self._carry = n_slots, n_slots > 1
        return n_slots

    def next(self) -> tuple[Group, Visit] | None:
        """The next unit, as its head group and visit; None if there is no more. A visit is valid
        only if units run in the order given."""
        while not self._visits:
            one = self._ahead.pop(0) if self._ahead else self._take()
            if one is None:
                return None
            self._current, self._visits = one.group, deque(self._visits_of(one))
        return self._current, self._visits.popleft()

    def whole_groups(self) -> Iterator[Group]:
        """The head groups left, each as one unit. A group counts as done when the next one is asked
        for."""
        while (unit := self.next()) is not None:
            yield unit[0]
            self.done(unit[0], unit[1].task.path)

    def done(self, group: Group, path: Path) -> None:
        """The results of a unit are stored, or their copies are issued."""
        one = self.begun[group]
        one.completed[path] = one.left.pop(path)
        self.units_done += 1
        self._finish_empty()

    def _take(self) -> GroupTasks | None:
        if not self.waiting:
            return None
        group = self.waiting.popleft()
        one = self.begun[group] = self._fresh(group)
        self._finish_empty()
        return one

    def _fresh(self, group: Group) -> GroupTasks:
        """A group with all its tasks left."""
        tasks = (WHOLE,) if self._cuts is None else self.cuts.tasks(self.depth)
        return GroupTasks(group, self.depth, {task.path: task for task in tasks})

    def _finish_empty(self) -> None:
        for group in [group for group, one in self.begun.items() if not one.left]:
            del self.begun[group]
            self.n_finished += 1

    def _visits_of(self, one: GroupTasks) -> Iterable[Visit]:
        """The visits of the tasks left of a group."""
        if one.left.get(()) is WHOLE:
            return (_WHOLE_VISIT,)
        left, key = list(one.left.values()), (one.depth, self._carry)
        if one.completed or not one.is_level:
            rows = tokens_of(*one.completed.values())
            return visits(left, touched=rows, carry=self._carry)
        if key not in self._level_visits:
            self._level_visits[key] = list(visits(left, carry=self._carry))
        return self._level_visits[key]

    def out_of_memory(self, said: str = "") -> None:
        """Memory ran out: units that were not reported done have to run again.

        Args:
            said: the allocator's message.
        """
        where = f"out of memory in {self.where}"
        if self._pinned:
            reason = "the depth is pinned, so the failure is reported as it is"
            self.given_up = f"{where} and no recovery: {reason}"
        elif self._cuts is None:
            self._fall_back(said)
        elif self.n_cap > 1:
            self.n_cap -= 1
            self.history.append(f"{where}: slots {self.n_cap + 1} -> {self.n_cap}")
        elif self.depth >= self._cuts.deepest:
            reason = f"one slot at depth {self.depth} is the finest decomposition"
            self.given_up = f"{where} and no recovery: {reason}"
        else:
            self.depth += 1
            self._cut_further()
            self.history.append(f"{where}: depth {self.depth - 1} -> {self.depth}")

    def _fall_back(self, said: str) -> None:
        """Cut the whole groups that are not done: they are too large."""
        assert self._fallback is not None
        self._cuts, failed, instead = self._fallback()
        self.depth, self.n_cap = self._cuts.depth, self._cuts.n_cap
        done = f", {self.n_finished} of {self.n_groups} head groups done" if self.n_finished else ""
        self.history.append(f"{failed} ({said}{done}): {instead}")
        self.waiting.extendleft(reversed(self.begun))
        self.begun.clear()

    def _cut_further(self) -> None:
        """Cut the tasks left of the groups begun to the present depth; others are cut when they
        begin."""
        for one in self.begun.values():
            while one.depth < self.depth:
                one.depth += 1
                finer = self.cuts.further(tuple(one.left.values()), one.depth)
                one.left, one.is_level = {task.path: task for task in finer}, False
        self._finish_empty()

    def headroom(self) -> None:
        """Free memory holds the slots of one level less twice, and nothing is in flight: cut the
        groups that are not begun one level less."""
        if self.may_coarsen:
            assert not self.begun, "headroom is for groups that are not begun"
            self.depth -= 1
            self.coarsenings += 1
            self.history.append(f"headroom: depth {self.depth + 1} -> {self.depth}")
