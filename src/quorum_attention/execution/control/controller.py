"""The recovery controller: what runs next, and what to do about failures (paper,
Section 3.4).

It is told what happens, and decides. It allocates nothing and never waits, so every
history of events can be tested without a device.

    out of memory, whole groups  -> groups not done are cut into tasks, for slots
    out of memory, n_cap > 1     -> units in flight return to the queue, n_cap - 1
    out of memory, n_cap = 1     -> the unfinished tasks are cut one level further
    ... and no finer level       -> give up
    headroom after a recovery    -> groups that are not begun are cut one level less
    the user chose the depth     -> give up at the first failure

No completed unit runs again.

The paper coarsens once all tasks are resident and memory is left. Here two slots
saturate a device, so all tasks are never resident. Instead *headroom* is measured: free
memory would hold the coarser slots twice. Only a level that a recovery added is taken
back, at most twice a pass, so that free memory that comes and goes cannot make a pass
alternate between depths for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from quorum_attention.decomposition import Task
from quorum_attention.decomposition.decomposition import tokens_of
from quorum_attention.execution.control.visits import Visit, visits
from quorum_attention.units import counted

if TYPE_CHECKING:
    from quorum_attention.execution.task_levels import TaskLevels

Path = tuple[int, ...]
# A depth, and whether state may be carried from one slot to the next.
_Level = tuple[int, bool]
# A head group; the controller only compares them.
Group: TypeAlias = Any


# The task of a head group that is not cut: the whole group is one unit.
WHOLE = Task((), ())
_WHOLE_VISIT = Visit(WHOLE, (), (), (), (), ())
MAX_COARSENINGS = 2


@dataclass(slots=True, eq=False)
class GroupTasks:
    """A head group that was begun.

    Attributes:
        depth: the depth of the unfinished tasks.
        remaining: the tasks that are not done, by path, in order.
        completed: the tasks that are done, by path.
        is_level: whether its tasks are all tasks of one depth, none of them cut further
            since.
    """

    group: Group
    depth: int
    remaining: dict[Path, Task]
    completed: dict[Path, Task] = field(default_factory=dict)
    is_level: bool = True


class RecoveryController:
    """Owns the queue of one pass.

    The pass works in attempts: ``start``, then ``next`` and ``done`` until no unit is
    left, or until memory runs out or there is headroom.

    Args:
        groups: the head groups, in order.
        levels: the tasks that a group is cut into; None: units are whole groups.
        n_cap: most slots.
        pinned: whether the user chose the depth: failures are then reported, not
            recovered from.
        fallback: called when memory runs out for whole groups: the tasks that they are
            cut into then; and in words what failed, and what is done instead.

    Attributes:
        depth: levels that the next groups are cut into.
        coarsenings: how often a level was taken back.
        waiting: groups that are not begun, in order.
        begun: groups that are begun and not finished, in order.
        n_finished: how many groups are done.
        units_done: how many units are done.
        n_slots: slots of this attempt.
        history: one line for each recovery, for reports and error messages.
        given_up: where memory ran out and why there is no recovery; "" as long as there
            is.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        levels: TaskLevels | None,
        n_cap: int,
        *,
        pinned: bool = False,
        fallback: Callable[[], tuple[TaskLevels, str, str]] | None = None,
    ) -> None:
        self._levels = levels
        self._fallback = fallback
        self._pinned = pinned
        self.n_cap = n_cap
        self.depth = 0 if levels is None else levels.depth
        self.coarsenings = 0
        self.waiting: deque[Group] = deque(groups)
        self.begun: dict[Group, GroupTasks] = {}
        self.n_groups = len(self.waiting)
        self.n_finished = 0
        self.units_done = 0
        self.n_slots = n_cap
        self.history: list[str] = []
        self.given_up = ""
        # The next four are an attempt's: groups begun before it; the group of the last
        # unit (None before the first); that group's next visits; whether state may be
        # carried from one slot to the next.
        self._unfinished: list[GroupTasks] = []
        self._current: Group | None = None
        self._visits: deque[Visit] = deque()
        self._carry = False
        # Visits of all tasks of a depth, worked out once for all groups.
        self._level_visits: dict[_Level, list[Visit]] = {}

    @property
    def levels(self) -> TaskLevels:
        """The tasks that groups are cut into."""
        assert self._levels is not None, "groups are whole"
        return self._levels

    @property
    def groups_are_whole(self) -> bool:
        """Whether each group is one unit."""
        return self._levels is None

    @property
    def finished(self) -> bool:
        """Whether every unit is done."""
        return self.n_finished == self.n_groups

    @property
    def units_left(self) -> int:
        """Units that are not done; groups not begun count as cut to the present
        depth."""
        n_units = 0
        for group_tasks in self.begun.values():
            n_units += len(group_tasks.remaining)
        if not self.waiting:
            return n_units
        if self.groups_are_whole:
            return n_units + len(self.waiting)
        tasks = self.levels.tasks(self.depth)
        return n_units + len(self.waiting) * len(tasks)

    @property
    def groups_left(self) -> list[Group]:
        """Head groups that are not done, in order."""
        return [*self.begun, *self.waiting]

    @property
    def may_coarsen(self) -> bool:
        """Whether ``headroom`` would take back a level."""
        if self._levels is None or self._pinned:
            return False
        has_recovered = self.depth > self._levels.depth
        return has_recovered and self.coarsenings < MAX_COARSENINGS

    @property
    def between_groups(self) -> bool:
        """Whether the next unit begins a group, but not the first of an attempt."""
        if self._current is None or self._visits:
            return False
        return bool(self.waiting) and not self._unfinished

    @property
    def where(self) -> str:
        """The first unit that is not done, in words."""
        remaining = [group_tasks.remaining for group_tasks in self.begun.values()]
        paths = chain.from_iterable(remaining)
        path = next(paths, ())
        n_groups = counted(self.n_groups - self.n_finished, "head group")
        return f"task {path or '()'} ({n_groups} to go)"

    def start(self) -> int:
        """Begin an attempt; returns how many slots it should use."""
        if not self.begun:
            self._begin_group()
        self._unfinished = list(self.begun.values())
        self._current = None
        self._visits = deque()
        self.n_slots = 1
        if not self.groups_are_whole:
            n_units = max(1, self.units_left)
            self.n_slots = min(self.n_cap, n_units)
        self._carry = self.n_slots > 1
        return self.n_slots

    def next(self) -> tuple[Group, Visit] | None:
        """The next unit, as its head group and visit; None if there is no more. A visit
        is valid only if units run in the order given."""
        while not self._visits:
            if self._unfinished:
                group_tasks: GroupTasks | None = self._unfinished.pop(0)
            else:
                group_tasks = self._begin_group()
            if group_tasks is None:
                return None
            self._current = group_tasks.group
            self._visits = deque(self._visits_of(group_tasks))
        return self._current, self._visits.popleft()

    def whole_groups(self) -> Iterator[Group]:
        """The head groups left, each as one unit. A group counts as done when the next
        one is asked for."""
        while (unit := self.next()) is not None:
            group, visit = unit
            yield group
            self.done(group, visit.task.path)

    def done(self, group: Group, path: Path) -> None:
        """The results of a unit are stored, or their copies are issued."""
        group_tasks = self.begun[group]
        task = group_tasks.remaining.pop(path)
        group_tasks.completed[path] = task
        self.units_done += 1
        self._finish_empty()

    def _begin_group(self) -> GroupTasks | None:
        """Begin the next group, with all its tasks; None if there is no more."""
        if not self.waiting:
            return None
        group = self.waiting.popleft()
        tasks = [WHOLE]
        if self._levels is not None:
            tasks = self._levels.tasks(self.depth)
        remaining = {task.path: task for task in tasks}
        group_tasks = GroupTasks(group, self.depth, remaining)
        self.begun[group] = group_tasks
        self._finish_empty()
        return group_tasks

    def _finish_empty(self) -> None:
        """Finish the groups that have no unfinished task."""
        for group, group_tasks in list(self.begun.items()):
            if not group_tasks.remaining:
                del self.begun[group]
                self.n_finished += 1

    def _visits_of(self, group_tasks: GroupTasks) -> Iterable[Visit]:
        """The visits of a group's unfinished tasks."""
        if group_tasks.remaining.get(()) is WHOLE:
            return (_WHOLE_VISIT,)
        remaining = list(group_tasks.remaining.values())
        if group_tasks.completed or not group_tasks.is_level:
            rows = tokens_of(*group_tasks.completed.values())
            return visits(remaining, touched=rows, carry=self._carry)
        key = (group_tasks.depth, self._carry)
        if key not in self._level_visits:
            level_visits = visits(remaining, carry=self._carry)
            self._level_visits[key] = list(level_visits)
        return self._level_visits[key]

    def out_of_memory(self, message: str = "") -> None:
        """Memory ran out: units that were not reported done have to run again.

        Args:
            message: the allocator's.
        """
        where = f"out of memory in {self.where}"
        if self._pinned:
            reason = "the depth is pinned, so the failure is reported as it is"
            self.given_up = f"{where} and no recovery: {reason}"
        elif self._levels is None:
            self._fall_back(message)
        elif self.n_cap > 1:
            before = self.n_cap
            self.n_cap -= 1
            self.history.append(f"{where}: slots {before} -> {self.n_cap}")
        elif self.depth >= self._levels.deepest:
            reason = f"one slot at depth {self.depth} is the finest decomposition"
            self.given_up = f"{where} and no recovery: {reason}"
        else:
            before = self.depth
            self.depth += 1
            self._cut_further()
            self.history.append(f"{where}: depth {before} -> {self.depth}")

    def _fall_back(self, message: str) -> None:
        """Cut the whole groups that are not done: they are too large."""
        assert self._fallback is not None
        self._levels, failed, instead = self._fallback()
        self.depth = self._levels.depth
        self.n_cap = self._levels.n_cap
        done = ""
        if self.n_finished:
            n_groups = counted(self.n_groups, "head group")
            done = f", {self.n_finished} of {n_groups} done"
        self.history.append(f"{failed} ({message}{done}): {instead}")
        self.waiting.extendleft(reversed(self.begun))
        self.begun.clear()

    def _cut_further(self) -> None:
        """Cut the unfinished tasks of the groups begun to the present depth; others are
        cut when they begin."""
        for group_tasks in self.begun.values():
            while group_tasks.depth < self.depth:
                group_tasks.depth += 1
                remaining = tuple(group_tasks.remaining.values())
                finer = self.levels.split_tasks(remaining, group_tasks.depth)
                group_tasks.remaining = {task.path: task for task in finer}
                group_tasks.is_level = False
        self._finish_empty()

    def headroom(self) -> None:
        """Free memory holds the slots of one level less twice, and nothing is in
        flight: cut the groups that are not begun one level less."""
        if self.may_coarsen:
            assert not self.begun, "headroom is for groups that are not begun"
            before = self.depth
            self.depth -= 1
            self.coarsenings += 1
            self.history.append(f"headroom: depth {before} -> {self.depth}")
