"""The work that a pass has left: head groups not begun, and tasks of groups that were begun."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING, Protocol

from quorum_attention.decomposition import Task
from quorum_attention.decomposition.tasks import tokens_of
from quorum_attention.execution.control.events import Group, Path
from quorum_attention.execution.control.visits import Visit, visits

if TYPE_CHECKING:
    from quorum_attention.execution.schedule import Schedule


# The task of a head group that is not cut: the whole group is one unit.
WHOLE = Task((), ())
_WHOLE_VISIT = Visit(WHOLE, (), (), (), (), ())


class Cuts(Protocol):
    """The tasks that a head group is cut into; the same for every group."""

    def tasks(self, depth: int) -> Sequence[Task]:
        """All tasks of ``depth``, in order."""

    def further(self, tasks: Sequence[Task], depth: int) -> Sequence[Task]:
        """The tasks of ``depth`` that ``tasks``, of one level less, are cut into, in order."""

    def schedule(self, depth: int) -> Schedule:
        """A schedule whose slots hold every task of ``depth`` that has been asked for."""


@dataclass(slots=True, eq=False)
class GroupTasks:
    """A head group that was begun.

    Attributes:
        depth: the depth of the tasks left.
        left: the tasks that are not done, by path, in order.
        completed: the tasks that are done, by path.
        in_flight: the paths of tasks left that were launched.
        steps: for each unit that overflowed, the steps down of its (entry, key/value head).
        is_level: whether its tasks are all tasks of one depth, none of them cut further since.
    """

    group: Group
    depth: int
    left: dict[Path, Task]
    completed: dict[Path, Task] = field(default_factory=dict)
    in_flight: set[Path] = field(default_factory=set)
    steps: dict[Path, dict[tuple[int, int], int]] = field(default_factory=dict)
    is_level: bool = True

    def done(self, path: Path) -> None:
        """Mark a unit in flight as done."""
        self.in_flight.remove(path)
        self.completed[path] = self.left.pop(path)
        self.steps.pop(path, None)

    def land(self) -> None:
        """Forget the units in flight: they have to run again."""
        self.in_flight.clear()
        self.steps.clear()


class Queue:
    """Head groups in order; a group that is begun belongs to one device until it is finished.

    Attributes:
        groups_are_whole: whether each group is one unit; there are no ``cuts`` then.
        waiting: groups that are not begun.
        returned: groups that were begun on a device that left the pass.
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
        """The tasks that groups are cut into."""
        assert self._cuts is not None, "groups are whole"
        return self._cuts

    def cut_by(self, cuts: Cuts) -> None:
        """Cut groups that begin from now on."""
        self._cuts, self.groups_are_whole = cuts, False

    def take(self, depth: int) -> GroupTasks | None:
        """The next group, for a device that works at ``depth``; None if there is none."""
        if self.returned:
            found = self.returned.popleft()
            self.cut(found, depth)
            return found
        return self.begun(self.waiting.popleft(), depth) if self.waiting else None

    def begun(self, group: Group, depth: int) -> GroupTasks:
        """A group that begins, with all tasks of ``depth`` left."""
        if self.groups_are_whole:
            return GroupTasks(group, depth, {(): WHOLE})
        return GroupTasks(group, depth, {task.path: task for task in self.cuts.tasks(depth)})

    def cut(self, found: GroupTasks, depth: int) -> None:
        """Cut the tasks left of a group down to ``depth``, if they are coarser."""
        while found.depth < depth:
            found.depth += 1
            finer = self.cuts.further(tuple(found.left.values()), found.depth)
            found.left = {task.path: task for task in finer}
            found.is_level = False

    def give_back(self, found: Sequence[GroupTasks]) -> None:
        """Put back groups that their device does not finish, in front and in order."""
        self.returned.extendleft(reversed([one for one in found if one.completed]))
        self.waiting.extendleft(reversed([one.group for one in found if not one.completed]))

    def divide(self, group: Group, parts: Sequence[Group]) -> None:
        """Put ``parts`` in the place of a group that waits."""
        at = self.waiting.index(group)
        self.waiting.remove(group)
        for part in reversed(parts):
            self.waiting.insert(at, part)

    def visits(self, found: GroupTasks, carry: bool) -> Iterator[Visit]:
        """The visits of the tasks left of a group (``carry``: see control/visits.py)."""
        if found.left.get(()) is WHOLE:
            return iter((_WHOLE_VISIT,))
        if found.completed or not found.is_level:
            left, rows = list(found.left.values()), tokens_of(*found.completed.values())
            return visits(left, touched=rows, carry=carry)
        key = (found.depth, carry)
        if key not in self._level_visits:
            tasks = list(found.left.values())
            self._level_visits[key] = _Replay(lambda: visits(tasks, carry=carry))
        return iter(self._level_visits[key])


class _Replay:
    """The items of an iterator, for any number of readers; it is run through only once.

    Args:
        make: makes the iterator, with the same items each time.
    """

    def __init__(self, make: Callable[[], Iterator[Visit]]) -> None:
        self._make = make
        self._source = make()
        self._seen: list[Visit] = []

    def __iter__(self) -> Iterator[Visit]:
        for number in count():
            if number == len(self._seen):
                try:
                    following = next(self._source, None)
                except BaseException:
                    # A generator that failed says from then on that it has no more items.
                    self._source = islice(self._make(), number, None)
                    raise
                if following is None:
                    return
                self._seen.append(following)
            yield self._seen[number]
