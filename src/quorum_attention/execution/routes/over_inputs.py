"""What routes have in common that run several tasks on the inputs as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.execution.case import Case
from quorum_attention.execution.schedule import Fallback, Route, Schedule
from quorum_attention.execution.takes import bytes_before, copied_bytes, result_bytes
from quorum_attention.execution.workload import GroupSize, Workload


@lru_cache(maxsize=64)
def all_rectangles(work: Workload, shape: Decomposition) -> tuple[Task, tuple[Rectangle, ...]]:
    """Every pair of a head group as rectangles of one task."""
    task = shape.whole()
    return task, task.rectangles(work.is_causal, work.n_queries, work.n_keys)


@dataclass(frozen=True, slots=True)
class OverInputs(Route):
    """Head groups of one batch entry, read where they lie, merged where they are computed."""

    def check(self, shape: Decomposition, group: GroupSize) -> None:
        """Refuse what is not cut, and groups of several batch entries."""
        if not shape.depth:
            raise ValueError("there is nothing to merge of one whole call")
        if group.batch != 1:
            raise ValueError(f"a head group has to be of one batch entry, got {group.batch}")

    def limits(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """Those of the rectangles of all tasks together."""
        _, rectangles = all_rectangles(work, shape)
        return (
            max((r.n_queries for r in rectangles), default=1),
            max((r.n_keys for r in rectangles), default=1),
        )

    def runs(self, schedule: Schedule, case: Case) -> bool:
        """Whether nothing has to be moved, and no mask be cut."""
        return case.work.mask is None and case.place.in_place and case.place.lse_here

    def results(self, schedule: Schedule, case: Case) -> tuple[int, ...]:
        """Bytes of what is returned, and of copies of what is given."""
        return *bytes_before(case), *copied_bytes(case, schedule.group), *result_bytes(case)

    def fallback(self, schedule: Schedule, work: Workload) -> Fallback:
        """The same tasks, through one slot."""
        slots = schedule.through_slots(work)
        return Fallback(slots, "inputs in place: out of memory", "through slots")
