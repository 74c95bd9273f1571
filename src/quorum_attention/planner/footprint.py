"""How many device bytes a schedule takes at most: the same sums the executor allocates by."""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.execution.device.backend import ROUNDING_BYTES
from quorum_attention.execution.pass_spec import PassSpec
from quorum_attention.execution.placement import Placement
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.protocol import InnerKernel


@dataclass(frozen=True, slots=True)
class Footprint:
    """Device bytes by purpose; ``total`` is what is held against the budget.

    ``rounding``: what the allocator may hand out beyond what it is asked for.
    """

    slots: int
    workspace: int
    accumulators: int
    results: int
    rounding: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.slots + self.workspace + self.accumulators + self.results + self.rounding


def footprint_of(
    work: Workload, schedule: Schedule, kernel: InnerKernel, spec: PassSpec, place: Placement
) -> Footprint:
    """Device bytes of a pass; what a backward reads of its forward is there already."""
    taken = schedule.route.takes(schedule, work, kernel, spec, place)
    tensors = [size for size in (taken.slots, *taken.accumulators, *taken.results) if size > 0]
    # A kernel's workspace bound has its own rounding in it.
    rounding = place.backend.rounding(tensors) + (ROUNDING_BYTES if taken.workspace > 0 else 0)
    return Footprint(
        taken.slots, taken.workspace, sum(taken.accumulators), sum(taken.results), rounding
    )
