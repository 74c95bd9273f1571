"""What a call asks of the planner, apart from its sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.execution.device.residency import Home
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Options:
    """Where and how a call may be run; None leaves a choice to the planner.

    Attributes:
        device: what computes.
        kernel: "auto", the name of a registered kernel, or a kernel.
        budget_bytes: device bytes that a pass may take; None: what is free when it begins.
        plan: the plan of one of the two passes; the other pass gets its levels.
        depth: number of levels; 0 is the monolithic call.
        accumulator: where unfinished rows are kept between tasks.
        watched: whether a report or progress is asked for.
    """

    device: torch.device
    kernel: str | InnerKernel = "auto"
    budget_bytes: int | None = None
    plan: Plan | None = None
    depth: int | None = None
    accumulator: Home | None = None
    watched: bool = False

    @property
    def pinned(self) -> bool:
        """Whether the depth is given: running out of memory is then reported, not recovered."""
        return self.plan is not None or self.depth is not None

    @property
    def free(self) -> bool:
        """Whether a short call may be run whole without asking how much memory is free."""
        return self.budget_bytes is None and not self.pinned
