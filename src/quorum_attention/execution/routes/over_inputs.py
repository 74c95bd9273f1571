"""What routes have in common that run several tasks on the inputs as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.execution.device.residency import Home
from quorum_attention.execution.job import Job
from quorum_attention.execution.pass_spec import PassSpec
from quorum_attention.execution.placement import Placement
from quorum_attention.execution.schedule import Fallback, Schedule
from quorum_attention.execution.takes import bytes_before, copied_bytes, result_bytes
from quorum_attention.execution.workload import Group, GroupSize, Workload, groups
from quorum_attention.kernels.protocol import InnerKernel


@lru_cache(maxsize=64)
def all_rectangles(work: Workload, shape: Decomposition) -> tuple[Task, tuple[Rectangle, ...]]:
    """Every pair of a head group as rectangles of one task."""
    task = shape.whole()
    return task, task.rectangles(work.is_causal, work.n_queries, work.n_keys)


@dataclass(frozen=True, slots=True)
class OverInputs:
    """Head groups of one batch entry, read where they lie, merged where they are computed."""

    n_cap: ClassVar[int] = 1
    accumulator: ClassVar[Home] = "device"
    accumulators: ClassVar[str] = "device"
    measured: ClassVar[bool] = True
    whole_groups: ClassVar[bool] = True

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

    def results(
        self,
        schedule: Schedule,
        work: Workload,
        kernel: InnerKernel,
        spec: PassSpec,
        place: Placement,
    ) -> tuple[int, ...]:
        """Bytes of what is returned, and of copies of what is given."""
        return (
            *bytes_before(spec, work, kernel, place),
            *copied_bytes(spec, work, schedule.group, place),
            *result_bytes(spec, work, place),
        )

    def fallback(self, schedule: Schedule, work: Workload) -> Fallback:
        """The same tasks, through one slot."""
        slots = schedule.through_slots(work)
        return Fallback(slots, "inputs in place: out of memory", "through slots")

    def groups(self, job: Job, schedule: Schedule) -> list[Group]:
        """All of them."""
        return list(groups(job.call.work, schedule.group))
