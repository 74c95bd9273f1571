"""What of a pass is left to do: head groups, and of those that were begun their tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol

from quorum_attention.decomposition import Task
from quorum_attention.decomposition.tasks import tokens_of
from quorum_attention.execution.control.events import Path
from quorum_attention.execution.control.visits import Visit, visits

if TYPE_CHECKING:
    from quorum_attention.execution.schedule import Schedule
    from quorum_attention.execution.workload import Group


# What a head group is where it is not cut: one unit, whatever is in it.
WHOLE = Task((), ())
_WHOLE_VISIT = Visit(WHOLE, (), (), (), (), ())


class Cuts(Protocol):
    """Says which tasks a head group is cut into; the same for every group."""

    def tasks(self, depth: int) -> Sequence[Task]:
        """All tasks of this depth, in order."""

    def further(self, tasks: Sequence[Task], depth: int) -> Sequence[Task]:
        """``tasks``, of one level less, each cut to this depth, in order."""

    def schedule(self, depth: int) -> Schedule:
        """With slots for all the tasks that were asked for at this depth."""


@dataclass(slots=True, eq=False)
class GroupTasks:
    """A head group that was begun.

    Attributes:
        depth: of the tasks that are left.
        left: tasks that are not done, by path, in order.
        completed: those that are.
        in_flight: paths of those that are left and were launched.
        steps: of units that overflowed, the steps down of their heads.
        is_level: whether all of its tasks are those of a depth, none cut since.
    """

    group: Group
    depth: int
    left: dict[Path, Task]
    completed: dict[Path, Task] = field(default_factory=dict)
    in_flight: set[Path] = field(default_factory=set)
    steps: dict[Path, dict[tuple[int, int], int]] = field(default_factory=dict)
    is_level: bool = True

    def done(self, path: Path) -> None:
        """A unit in flight is done."""
        self.in_flight.remove(path)
        self.completed[path] = self.left.pop(path)
        self.steps.pop(path, None)

    def land(self) -> None:
        """Nothing of it is in flight any more."""
        self.in_flight.clear()
        self.steps.clear()


class Queue:
    """Head groups in order; a group that is begun belongs to one device until it is finished.

    Attributes:
        groups_are_whole: whether groups are not cut; there are no ``cuts`` then.
        waiting: groups that nobody has begun.
        returned: begun on devices that are gone.
        finished: groups that are done.
    """

    def __init__(self, groups: Iterable[Group], cuts: Cuts | None) -> None:
        self._cuts = cuts
        self.groups_are_whole = cuts is None
        self.waiting: deque[Group] = deque(groups)
        self.returned: deque[GroupTasks] = deque()
        self.finished: list[Group] = []
        self._level_visits: dict[tuple[int, bool], _Replay] = {}

    def __bool__(self) -> bool:
        return bool(self.waiting or self.returned)

    @property
    def cuts(self) -> Cuts:
        """What its groups are cut by."""
        assert self._cuts is not None, "groups are whole"
        return self._cuts

    def cut_by(self, cuts: Cuts) -> None:
        """Groups are cut from here on."""
        self._cuts, self.groups_are_whole = cuts, False

    def take(self, depth: int) -> GroupTasks | None:
        """The next group for a device that works at ``depth``; None where there is none."""
        if self.returned:
            found = self.returned.popleft()
            self.cut(found, depth)
            return found
        return self.begun(self.waiting.popleft(), depth) if self.waiting else None

    def begun(self, group: Group, depth: int) -> GroupTasks:
        """A group with all tasks of ``depth`` left."""
        if self.groups_are_whole:
            return GroupTasks(group, depth, {(): WHOLE})
        return GroupTasks(group, depth, {task.path: task for task in self.cuts.tasks(depth)})

    def cut(self, found: GroupTasks, depth: int) -> None:
        """Cut what is left of a group down to ``depth``, if it is coarser."""
        while found.depth < depth:
            found.depth += 1
            finer = self.cuts.further(tuple(found.left.values()), found.depth)
            found.left = {task.path: task for task in finer}
            found.is_level = False

    def give_back(self, found: Sequence[GroupTasks]) -> None:
        """Groups that their device does not finish, in order: the first to be taken again."""
        self.returned.extendleft(reversed([one for one in found if one.completed]))
        self.waiting.extendleft(reversed([one.group for one in found if not one.completed]))

    def visits(self, found: GroupTasks, carry: bool) -> Iterator[Visit]:
        """The visits of what is left of a group (``carry``: see control/visits.py)."""
        if found.left.get(()) is WHOLE:
            return iter((_WHOLE_VISIT,))
        if found.completed or not found.is_level:
            left, rows = list(found.left.values()), tokens_of(*found.completed.values())
            return visits(left, touched=rows, carry=carry)
        key = (found.depth, carry)
        if key not in self._level_visits:
            self._level_visits[key] = _Replay(visits(list(found.left.values()), carry=carry))
        return iter(self._level_visits[key])


class _Replay:
    """What an iterator yields, for any number of readers; it is asked only once."""

    def __init__(self, source: Iterator[Visit]) -> None:
        self._source = source
        self._seen: list[Visit] = []

    def __iter__(self) -> Iterator[Visit]:
        for number in count():
            if number == len(self._seen):
                following = next(self._source, None)
                if following is None:
                    return
                self._seen.append(following)
            yield self._seen[number]
