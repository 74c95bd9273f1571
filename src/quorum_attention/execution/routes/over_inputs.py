"""What the routes ``together`` and ``in_place`` have in common."""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.decomposition.pieces import Pieces, pieces_of
from quorum_attention.execution.case import Case
from quorum_attention.execution.schedule import Route, Schedule
from quorum_attention.execution.takes import bytes_before, copied_bytes, result_bytes
from quorum_attention.execution.workload import GroupSize, Workload


def all_rectangles(
    work: Workload, shape: Decomposition, pieces: Pieces = "halves"
) -> tuple[Task, tuple[Rectangle, ...]]:
    """The whole sequence as one task, and rectangles of it that hold every pair of a call."""
    return pieces_of(shape, pieces, work.is_causal, work.n_queries, work.n_keys)


@dataclass(frozen=True, slots=True)
class OverInputs(Route):
    """A route of several tasks over the inputs as they lie. A head group has one batch entry."""

    recovery = "inputs in place: out of memory", "through slots"

    def check(self, shape: Decomposition, group: GroupSize) -> None:
        """Refuse a decomposition without levels, and a head group of several batch entries."""
        if not shape.depth:
            raise ValueError("there is nothing to merge of one whole call")
        if group.batch != 1:
            raise ValueError(f"a head group has to be of one batch entry, got {group.batch}")

    def limits(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """Most queries and most keys of the rectangles of all tasks together."""
        _, rectangles = all_rectangles(work, shape)
        return (
            max((r.n_queries for r in rectangles), default=1),
            max((r.n_keys for r in rectangles), default=1),
        )

    def runs(self, schedule: Schedule, case: Case) -> bool:
        """Whether all inputs can be read where they lie, and the call has no mask."""
        return case.work.mask is None and case.place.in_place and case.place.lse_here

    def results(self, schedule: Schedule, case: Case) -> tuple[int, ...]:
        """Bytes of the results, and of the copies of inputs that a pass makes."""
        rows = self.rows_copied(schedule, case)
        copied = copied_bytes(case, schedule.group, rows)
        return *bytes_before(case), *copied, *result_bytes(case)

    def rows_copied(self, schedule: Schedule, case: Case) -> int | None:
        """Most rows of a head that are copied at a time where operators cannot read an input; None:
        all rows of a head group."""
        return None

    def fallback(self, schedule: Schedule, work: Workload) -> Schedule:
        """The same tasks through slots."""
        return schedule.through_slots(work)
