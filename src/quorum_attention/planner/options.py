"""The options of a call as the planner reads them, and what its budget holds beside a
pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.allocate import Home
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.planner.plan import Plan
from quorum_attention.units import format_bytes, format_least


class Reserve(NamedTuple):
    """Bytes of a budget that something else than the pass takes.

    Attributes:
        purpose: what takes them, in words for an error.
    """

    n_bytes: int
    purpose: str


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Where and how a call may be run; None leaves a choice to the planner.

    Attributes:
        device: what computes.
        kernel: "auto", the name of a registered kernel, or a kernel.
        budget_bytes: device bytes that a pass may take; None: what is free when it
            begins.
        plan: the plan of one of the two passes; the other pass gets its levels,
            unless they are those of tasks that take over from streaming.
        depth: number of levels; 0 is the monolithic call.
        accumulator: where unfinished rows are kept between tasks.
        watched: whether a report or progress is asked for.
        reserves: what the budget has to hold beside the pass.
    """

    device: torch.device
    kernel: str | InnerKernel = "auto"
    budget_bytes: int | None = None
    plan: Plan | None = None
    depth: int | None = None
    accumulator: Home | None = None
    watched: bool = False
    reserves: tuple[Reserve, ...] = ()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the budget that the pass may not take."""
        return sum(reserve.n_bytes for reserve in self.reserves)

    @property
    def available_bytes(self) -> int | None:
        """The bytes that the reserves leave to the pass; None without a budget."""
        if self.budget_bytes is None:
            return None
        return max(0, self.budget_bytes - self.reserved_bytes)

    def reserving(self, n_bytes: int, purpose: str) -> PlannerOptions:
        """Return the options with ``n_bytes`` of the budget reserved, for a purpose in
        words."""
        if n_bytes == 0 or self.budget_bytes is None:
            return self
        return replace(self, reserves=(*self.reserves, Reserve(n_bytes, purpose)))

    def of_whole_budget(self, error: BudgetError) -> BudgetError:
        """Return the error about the whole budget, for one about what the reserves
        leave of it."""
        budget = self.budget_bytes
        if not self.reserves or budget is None or error.smallest_bytes is None:
            return error
        smallest = error.smallest_bytes + self.reserved_bytes
        reserved = ", ".join(
            f"{r.purpose} {format_bytes(r.n_bytes)}" for r in self.reserves
        )
        return BudgetError(
            f"a budget of {format_bytes(budget)} ({budget} bytes) is too small for "
            f"this call; the smallest that works is {format_least(smallest)} "
            f"({smallest} bytes): {reserved}, and beside that {error}",
            smallest_bytes=smallest,
        )

    @property
    def pinned(self) -> bool:
        """Whether the depth is given: running out of memory is then reported, not
        recovered."""
        return self.plan is not None or self.depth is not None
