"""The machine: which unit runs where, and how to recover from failures (paper, Section 3.4).

It is told events (control/events.py) and answers with instructions (control/events.py). It
allocates nothing, never waits, and knows devices by number only, so every history of events can be
tested without a device.

    out of memory, whole groups  -> groups that are not done are cut into tasks, for slots
    out of memory, n_cap > 1     -> units in flight return to the queue, n_cap - 1
    out of memory, n_cap = 1     -> the tasks left are cut one level further
    ... and no finer level       -> the device leaves the pass; the last device gives up
    the plan did not ask how much memory is free -> the pass is planned anew
    headroom after a recovery    -> groups that are not begun are cut one level less
    the user chose the depth     -> give up at the first failure
    overflow of scaled gradients -> the unit runs again, scaled down further, while that may help
    a device is lost             -> its units in flight return to the queue

No instruction makes a completed unit run again.

Every device has its own number of slots and its own depth: a small device cuts its groups finer
than a large one. A head group belongs to one device at a time. Between units the state of its rows
is stored at its home, so another device can continue the group.

The paper coarsens once all tasks are resident and memory is left. Here two slots saturate a
device, so all tasks are never resident. Instead *headroom* is measured: free memory would hold the
coarser slots twice. Only a level that a recovery added is taken back, at most twice a pass, so that
free memory that comes and goes cannot make a pass alternate between depths for ever.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING, Protocol

from quorum_attention.decomposition import Task
from quorum_attention.decomposition.tasks import tokens_of
from quorum_attention.execution.control.events import (
    Coarsen,
    Continue,
    Deepen,
    DeviceJoined,
    DeviceLost,
    Event,
    FallBack,
    GiveUp,
    Group,
    Headroom,
    Instruction,
    Launch,
    LowerCap,
    NeedsPlan,
    OutOfMemory,
    Overflow,
    Path,
    PlanAnew,
    Repeat,
    Requeue,
    UnitDone,
)
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

    def requeue_in_flight(self) -> None:
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


MOST_COARSENINGS = 2
# The number of the device, in a pass on one device.
HERE = 0
# Set while tests run: the machine then checks itself after every event.
CHECKED = "QUORUM_ATTENTION_CHECKED"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine stays within.

    Attributes:
        depth: levels as planned; coarsening never goes below.
        max_depth: most levels; deeper tasks would be smaller than a tile.
        pinned: whether the user chose the depth: failures are then reported, not recovered from.
        guessed: whether nobody asked how much memory is free, because the call is short. It is one
            unit, so if it fails nothing is done yet, and the pass is planned anew.
    """

    depth: int
    max_depth: int
    pinned: bool = False
    guessed: bool = False


@dataclass(frozen=True, slots=True)
class Fallback:
    """How to continue through slots when memory runs out for whole head groups.

    Attributes:
        cuts: the tasks that groups are cut into.
        limits: the limits of the machine from then on.
        n_cap: the slots of each device.
        failed: what failed, in words, for the history.
        instead: what is done instead, in words.
    """

    cuts: Cuts
    limits: Limits
    n_cap: int
    failed: str
    instead: str


@dataclass(slots=True)
class OnDevice:
    """The work of one device. An attempt begins with each ``Machine.start``.

    Attributes:
        n_cap: most slots.
        depth: levels that its next groups are cut into.
        coarsenings: how often it took back a level.
        groups: groups begun here and not finished, in order.
        ahead: those of ``groups`` that this attempt has not launched from yet.
        current: the group launched from last; None before the first launch of an attempt.
        visits: the visits of ``current`` that are not launched yet.
        carry: whether state may be carried from one slot to the next.
        whole_groups: whether the units of this attempt are whole head groups.
    """

    n_cap: int
    depth: int
    coarsenings: int = 0
    groups: dict[Group, GroupTasks] = field(default_factory=dict)
    ahead: list[GroupTasks] = field(default_factory=list)
    current: GroupTasks | None = None
    visits: Iterator[Visit] = field(default_factory=lambda: iter(()))
    carry: bool = False
    whole_groups: bool = False


class Machine:
    """Owns the queue of one pass, for any number of devices.

    A device works in attempts: ``start``, then ``next`` and ``UnitDone`` until no unit is left for
    it, or until another event.

    Args:
        groups: the head groups, in order.
        cuts: the tasks that a group is cut into. A function instead means that units are whole
            groups; it is called when memory runs out, and says how to continue.
        n_caps: the slots of each device, by its number.

    Attributes:
        limits: what the machine stays within.
        queue: the work that no device has.
        n_groups: how many head groups there are.
        devices: the work of each device, by its number.
        history: one line for each recovery, for reports and error messages.
        end: why the pass ends before all units are done; None as long as it does not.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        cuts: Cuts | Callable[[], Fallback],
        limits: Limits,
        n_caps: Mapping[int, int],
    ) -> None:
        self.limits = limits
        self._instead = cuts if callable(cuts) else None
        self.queue = Queue(groups, None if callable(cuts) else cuts)
        self.n_groups = len(self.queue.waiting)
        self.history: list[str] = []
        self.end: GiveUp | PlanAnew | None = None
        self.devices = {device: self._new(n_cap) for device, n_cap in n_caps.items()}
        self._several = len(n_caps) > 1
        self._checked = CHECKED in os.environ

    @property
    def finished(self) -> bool:
        """Whether every unit is done."""
        return len(self.queue.finished) == self.n_groups

    @property
    def units_left(self) -> int:
        """Units that are not done; groups not begun count as cut to the first device's depth."""
        depth = next((it.depth for it in self.devices.values()), self.limits.depth)
        begun = [g for it in self.devices.values() for g in it.groups.values()]
        left = sum(len(g.left) for g in (*begun, *self.queue.returned))
        if self.queue.waiting:
            waiting, whole = len(self.queue.waiting), self.queue.groups_are_whole
            left += waiting if whole else waiting * len(self.queue.cuts.tasks(depth))
        return left

    @property
    def groups_left(self) -> list[Group]:
        """Head groups that are not done, in order."""
        begun = [group for here in self.devices.values() for group in here.groups]
        return [*begun, *(one.group for one in self.queue.returned), *self.queue.waiting]

    def start(self, device: int) -> int:
        """Begin an attempt of ``device``; returns how many slots it should use."""
        here = self.devices[device]
        here.whole_groups = self.queue.groups_are_whole
        if not here.groups:
            self._take(here)
        n_slots = 1 if here.whole_groups else min(here.n_cap, max(1, self.units_left))
        here.ahead, here.current, here.visits = list(here.groups.values()), None, iter(())
        here.carry = n_slots > 1
        return n_slots

    def next(self, device: int) -> Launch | None:
        """The next unit of ``device``; None if this attempt has no more for it."""
        here = self.devices[device]
        while (visit := next(here.visits, None)) is None:
            found = here.ahead.pop(0) if here.ahead else self._take(here)
            if found is None:
                # Groups may be left: if they are cut from now on, another attempt begins them.
                return None
            here.current, here.visits = found, self.queue.visits(found, here.carry)
        assert here.current is not None
        here.current.in_flight.add(visit.task.path)
        return Launch(here.current.group, visit)

    def whole_groups(self, device: int) -> Iterator[Group]:
        """The head groups left for a device that takes them whole. A group counts as done when the
        next one is asked for."""
        while (launch := self.next(device)) is not None:
            yield launch.group
            self.on(UnitDone(device, launch.group, launch.visit.task.path))

    def between_groups(self, device: int) -> bool:
        """Whether the next unit of ``device`` begins a group, but not the first of an attempt."""
        here = self.devices[device]
        launched = here.current is not None and len(here.current.in_flight) == len(
            here.current.left
        )
        return launched and not here.ahead and bool(self.queue)

    def may_coarsen(self, device: int) -> bool:
        """Whether ``Headroom`` of ``device`` would take back a level."""
        here, limits = self.devices[device], self.limits
        recovered = here.depth > limits.depth and not limits.pinned
        return recovered and here.coarsenings < MOST_COARSENINGS

    def on(self, event: Event) -> Instruction:
        """Take in ``event``; returns what to do about it."""
        match event:
            case UnitDone():
                order = self._done(event)
            case OutOfMemory():
                order = self._out_of_memory(event)
            case NeedsPlan():
                order = self._plan_anew(event.device, event.why)
            case Overflow():
                order = self._overflow(event)
            case Headroom():
                order = self._headroom(event)
            case DeviceLost():
                order = self._leave(event.device, "lost")
            case DeviceJoined():
                order = self._joined(event)
        if self._checked:
            check(self, event)
        return order

    def divide(self, group: Group, parts: Sequence[Group]) -> None:
        """Put ``parts`` in the place of a group that is not begun."""
        self.queue.divide(group, parts)
        self.n_groups += len(parts) - 1

    def where(self, device: int) -> str:
        """The first unit of ``device`` that is not done, in words."""
        here = self.devices[device]
        path = next((path for found in here.groups.values() for path in found.left), ())
        return (
            f"task {path or '()'} ({self.n_groups - len(self.queue.finished)} head group(s) to go)"
        )

    def _take(self, here: OnDevice) -> GroupTasks | None:
        same = here.whole_groups == self.queue.groups_are_whole
        found = self.queue.take(here.depth) if same else None
        if found is not None:
            here.groups[found.group] = found
            self._finish_empty(here)
        return found

    def _finish_empty(self, here: OnDevice) -> None:
        for group in [group for group, found in here.groups.items() if not found.left]:
            del here.groups[group]
            self.queue.finished.append(group)

    def _new(self, n_cap: int) -> OnDevice:
        return OnDevice(n_cap, self.limits.depth, whole_groups=self.queue.groups_are_whole)

    def _done(self, event: UnitDone) -> Instruction:
        here = self.devices[event.device]
        found = here.groups[event.group]
        found.done(event.path)
        if not found.left:
            self._finish_empty(here)
        return Continue()

    def _out_of_memory(self, event: OutOfMemory) -> Instruction:
        here, limits = self.devices[event.device], self.limits
        where = self.where(event.device)
        if limits.pinned:
            return self._give_up(where, "the depth is pinned, so the failure is reported as it is")
        if limits.guessed:
            return self._plan_anew(event.device, f"monolithic call out of memory ({event.said})")
        if here.whole_groups:
            return self._fall_back(event)
        if here.n_cap == 1 and here.depth >= limits.max_depth:
            reason = f"one slot at depth {here.depth} is the finest decomposition there is"
            if len(self.devices) > 1:
                return self._leave(event.device, f"out of memory in {where}: {reason}")
            return self._give_up(where, reason)
        for found in here.groups.values():
            found.requeue_in_flight()
        order: Instruction
        if here.n_cap > 1:
            here.n_cap -= 1
            order, change = LowerCap(here.n_cap), f"n_cap {here.n_cap + 1} -> {here.n_cap}"
        else:
            here.depth += 1
            order, change = Deepen(here.n_cap), f"depth {here.depth - 1} -> {here.depth}"
            self._cut_further(here)
        self._note(event.device, f"out of memory in {where}: {change}")
        return order

    def _fall_back(self, event: OutOfMemory) -> Instruction:
        """Cut the whole groups that are not begun on other devices: they are too large."""
        here = self.devices[event.device]
        if self.queue.groups_are_whole:
            assert self._instead is not None
            found = self._instead()
            self.limits = found.limits
            self.queue.cut_by(found.cuts)
            for each in self.devices.values():
                each.depth, each.n_cap = found.limits.depth, found.n_cap
            done = len(self.queue.finished)
            so_far = f", {done} of {self.n_groups} head groups done" if done else ""
            self._note(event.device, f"{found.failed} ({event.said}{so_far}): {found.instead}")
        else:
            self._note(event.device, f"out of memory ({event.said}): its head groups are cut")
        groups = list(here.groups.values())
        for one in groups:
            one.requeue_in_flight()
        here.groups.clear()
        self.queue.give_back(groups)
        return FallBack()

    def _give_up(self, where: str, reason: str) -> Instruction:
        self.end = GiveUp(where, reason)
        return self.end

    def _plan_anew(self, device: int, why: str) -> Instruction:
        assert self.limits.guessed, "another plan knew what memory there was"
        assert not self.queue.finished, "what is done is not computed again"
        self._note(device, f"{why}: planned anew")
        self.end = PlanAnew(why)
        return self.end

    def _cut_further(self, here: OnDevice) -> None:
        """Cut the tasks left of the device's groups to its depth."""
        for number, (group, found) in enumerate(tuple(here.groups.items())):
            if number and not found.completed and found.depth < here.depth:
                # It was only loaded ahead and nothing of it is done, so it begins anew.
                here.groups[group] = self.queue.begun(group, here.depth)
            else:
                self.queue.cut(found, here.depth)
        self._finish_empty(here)

    def _overflow(self, event: Overflow) -> Instruction:
        found = self.devices[event.device].groups[event.group]
        steps = found.steps.setdefault(event.path, {})
        lower = {head: steps.get(head, 0) + 1 for head, most in event.most.items()
                 if steps.get(head, 0) < most}  # fmt: skip
        if not lower:
            return Continue()
        steps.update(lower)
        return Repeat(dict(steps))

    def _headroom(self, event: Headroom) -> Instruction:
        here = self.devices[event.device]
        if not self.may_coarsen(event.device):
            return Continue()
        assert not here.groups, "headroom is for groups that are not begun"
        here.depth -= 1
        here.coarsenings += 1
        self._note(event.device, f"headroom: depth {here.depth + 1} -> {here.depth}")
        return Coarsen(here.n_cap)

    def _leave(self, device: int, why: str) -> Instruction:
        """Take a device out of the pass, and put its groups back."""
        where = self.where(device)
        groups = list(self.devices.pop(device).groups.values())
        units = tuple((found.group, path) for found in groups for path in found.in_flight)
        for found in groups:
            found.requeue_in_flight()
        self.queue.give_back(groups)
        if not self.devices and not self.finished:
            return self._give_up(where, f"{why}, and there is no other device")
        self._note(device, f"{why}: {len(units)} unit(s) go to others")
        return Requeue(units)

    def _joined(self, event: DeviceJoined) -> Instruction:
        assert event.device not in self.devices, "a device joins once"
        self._several = True
        self.devices[event.device] = self._new(event.n_cap)
        self._note(event.device, "joined")
        return Continue()

    def _note(self, device: int, line: str) -> None:
        self.history.append(f"device {device}: {line}" if self._several else line)


def without_a_plan(every: Group) -> Machine:
    """The machine of a call so short that it is run without a plan, as one unit of all heads. Made
    when that has failed: until then there is nothing to decide."""
    return Machine((every,), _cannot_be_cut, Limits(0, 0, guessed=True), {HERE: 1})


def _cannot_be_cut() -> Fallback:
    raise AssertionError("it is planned anew instead")


def check(machine: Machine, event: Event) -> None:
    """Raise AssertionError if a unit would be lost or run twice, or a limit is exceeded."""
    limits, queue = machine.limits, machine.queue
    for device, here in machine.devices.items():
        assert here.n_cap >= 1, f"device {device} has {here.n_cap} slots"
        deepest = max(limits.depth, limits.max_depth)
        assert limits.depth <= here.depth <= deepest, f"device {device} is at depth {here.depth}"
    begun = [one for here in machine.devices.values() for one in here.groups.values()]
    begun += queue.returned
    places = Counter([*queue.waiting, *queue.finished, *(one.group for one in begun)])
    assert len(places) == machine.n_groups, "a head group is lost"
    assert max(places.values(), default=1) == 1, "a head group is in two places"
    if not isinstance(event, UnitDone):
        for one in begun:
            check_group(one)


def check_group(one: GroupTasks) -> None:
    """Raise AssertionError if completed tasks and tasks left of a group have pairs in common."""
    assert one.left, "a group without tasks left is finished"
    assert one.in_flight <= one.left.keys(), "what is in flight is not done"
    assert not one.left.keys() & one.completed.keys(), "a completed unit would run again"
    every = one.left.keys() | one.completed.keys()
    for path in every:
        above = next((path[:n] for n in range(len(path)) if path[:n] in every), None)
        assert above is None, f"task {path} is part of task {above}, which is there as well"
