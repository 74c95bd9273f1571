"""The events that a machine is told about while a pass runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from quorum_attention.execution.control.visits import Visit

Path = tuple[int, ...]
# What is handed out: a head group of a pass on one device, a part of a call on several, or anything
# else that can be hashed. The machine only compares them.
Group: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class UnitDone:
    """The results of a unit are stored, or their copies are issued."""

    device: int
    group: Group
    path: Path


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """``device`` ran out of memory; units that it has not reported done have to run again.

    ``said`` is the allocator's message.
    """

    device: int
    said: str = ""


@dataclass(frozen=True, slots=True)
class NeedsPlan:
    """A call that ``device`` ran without a plan failed; ``why``, in words."""

    device: int
    why: str


@dataclass(frozen=True, slots=True)
class Overflow:
    """Gradients of a unit of the scaled backward are not finite.

    ``most`` maps each (entry, key/value head) at fault to the most steps down that its numbers
    allow (see execution/scaling.py).
    """

    device: int
    group: Group
    path: Path
    most: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Headroom:
    """Free memory holds the slots of one level less twice; nothing is in flight on ``device``."""

    device: int


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """``device`` is gone; the results that it reported done are in host memory."""

    device: int


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    """``device`` joins the pass, with ``n_cap`` slots at most."""

    device: int
    n_cap: int


Event = UnitDone | OutOfMemory | NeedsPlan | Overflow | Headroom | DeviceLost | DeviceJoined


@dataclass(frozen=True, slots=True)
class Launch:
    """Run this unit. Its visit is valid only if the device runs its units in the order given."""

    group: Group
    visit: Visit


@dataclass(frozen=True, slots=True)
class LowerCap:
    """Continue with ``n_cap`` slots, one fewer; units that were in flight are queued again."""

    n_cap: int


@dataclass(frozen=True, slots=True)
class Deepen:
    """Continue one level deeper, with ``n_cap`` slots.

    Tasks left of the groups that were begun have been cut; other groups are cut when they begin.
    Units that were in flight are queued again.
    """

    n_cap: int


@dataclass(frozen=True, slots=True)
class Coarsen:
    """Cut the groups that are not begun one level less; continue with ``n_cap`` slots."""

    n_cap: int


@dataclass(frozen=True, slots=True)
class FallBack:
    """Head groups that are not done are cut into tasks, which go through slots."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Run the unit again from the state before it.

    ``steps`` maps each (entry, key/value head) that is scaled down to its number of steps.
    """

    steps: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Requeue:
    """The device leaves the pass; ``units``, in flight on it, are queued again."""

    units: tuple[tuple[Group, Path], ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report the failure: the unit that failed, and why there is no recovery."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlanAnew:
    """Plan the pass again, this time with the memory that is free: nothing of it is done, and this
    machine has no more to say. ``why``, in words.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Continue:
    """Nothing changes."""


Instruction = (
    LowerCap | Deepen | Coarsen | FallBack | Repeat | Requeue | GiveUp | PlanAnew | Continue
)
