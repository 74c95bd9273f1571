"""How many device bytes a schedule takes at most: the same sums that the executor allocates by."""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.execution.case import Case
from quorum_attention.execution.device.backend import ROUNDING_BYTES
from quorum_attention.execution.schedule import Schedule


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


def footprint_of(schedule: Schedule, case: Case) -> Footprint:
    """Device bytes of a pass. What a backward reads of its forward is not counted: it is allocated
    when the pass begins."""
    taken = schedule.route.takes(schedule, case)
    tensors = [size for size in (taken.slots, *taken.accumulators, *taken.results) if size > 0]
    # A workspace is counted with one fixed rounding: the kernel's bound includes the rest.
    rounding = ROUNDING_BYTES if taken.workspace > 0 else 0
    return Footprint(
        slots=taken.slots,
        workspace=taken.workspace,
        accumulators=sum(taken.accumulators),
        results=sum(taken.results),
        rounding=rounding + case.place.backend.rounding(tensors),
    )
