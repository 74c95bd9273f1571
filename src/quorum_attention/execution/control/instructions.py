"""What a machine tells those who run a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quorum_attention.execution.control.events import Path
from quorum_attention.execution.control.visits import Visit

if TYPE_CHECKING:
    from quorum_attention.execution.workload import Group


@dataclass(frozen=True, slots=True)
class Launch:
    """Run this unit; where its rows come from and go to holds for units of a device in order."""

    group: Group
    visit: Visit


@dataclass(frozen=True, slots=True)
class LowerCap:
    """Run on with fewer slots; what was in flight is queued again."""

    n_cap: int


@dataclass(frozen=True, slots=True)
class Deepen:
    """What remains of the groups in work has been cut one level further, groups not begun will be;
    run on with ``n_cap`` slots; what was in flight is queued again."""

    n_cap: int


@dataclass(frozen=True, slots=True)
class Coarsen:
    """Groups from here on are cut one level less; run on with ``n_cap`` slots."""

    n_cap: int


@dataclass(frozen=True, slots=True)
class FallBack:
    """Head groups that are not done are cut, and go through slots."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Run the unit again from what was stored before it, its heads so many steps down."""

    steps: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Requeue:
    """The device takes no further part; these units, in flight on it, are queued again."""

    units: tuple[tuple[Group, Path], ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report the failure: where it was, why nothing more can be done, what was done before."""

    where: str
    reason: str
    history: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Continue:
    """Nothing changes."""


Instruction = LowerCap | Deepen | Coarsen | FallBack | Repeat | Requeue | GiveUp | Continue
