"""The work of a pass in counts: units, calls and copied bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quorum_attention.decomposition.layouts import Pieces
from quorum_attention.decomposition.rectangles import Batch


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """The work of a pass in counts; the planner turns it into seconds
    (planner/price.py).

    Attributes:
        units: units of all head groups.
        pieces: how the rectangles of a unit are laid out, if a unit is all tasks of a
            head group; None: a unit is one task.
        uncut: whether kernel calls are larger than a cache holds, because they are not
            cut.
        merges: whether results of kernel calls are merged.
        up, down: bytes copied into slots, and out of them.
        resident: whether these copies stay within device memory.
        overlapping_units: copies overlap with compute in all but one of this many
            units; 1 means no overlap.
        in_slots: whether units go through slots, which the host sets up.
        run_copies: copies that the host issues for each run of neighbouring tokens of a
            unit.
        uniform_units: whether all units take the same time.
        calls: returns the kernel calls of a head, where they are no tasks', and how
            many of each size there are; None: those of the decomposition's tasks. To
            count them takes longer than all else, and most schedules are left out
            without it.
    """

    units: int
    pieces: Pieces | None = None
    uncut: bool = False
    merges: bool = True
    up: float = 0.0
    down: float = 0.0
    resident: bool = False
    overlapping_units: int = 1
    in_slots: bool = False
    run_copies: int = 0
    uniform_units: bool = True
    calls: Callable[[], tuple[tuple[Batch, int], ...]] | None = None
