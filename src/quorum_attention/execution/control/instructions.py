"""The instructions of a machine to the code that runs a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quorum_attention.execution.control.events import Group, Path
from quorum_attention.execution.control.visits import Visit


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
