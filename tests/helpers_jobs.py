"""Passes with their tensors, as no call makes them."""

from __future__ import annotations

import torch

from quorum_attention.execution.call import Job, MaskView
from quorum_attention.execution.problem import FORWARD, Placement, Problem, Workload
from quorum_attention.kernels import get_kernel


def a_job(
    work: Workload,
    three: tuple[torch.Tensor, ...],
    mask: torch.Tensor | None,
    scale: float,
) -> Job:
    """A forward on the CPU by kernel "dense"."""
    place = Placement("cpu", True, False, work.dtype)
    problem = Problem(work, get_kernel("dense"), FORWARD, place)
    tensors = dict(zip(("query", "key", "value"), three, strict=True))
    view = None if mask is None else MaskView(mask, len(work.batch_shape))
    return Job(problem, tensors, scale, torch.device("cpu"), view)
