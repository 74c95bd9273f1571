"""The machine's invariants, checked after every event while tests run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from quorum_attention.execution.control.events import Event, UnitDone
from quorum_attention.execution.control.queue import GroupTasks

if TYPE_CHECKING:
    from quorum_attention.execution.control.machine import Machine


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
