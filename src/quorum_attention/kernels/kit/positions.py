"""Where the tokens of a task's rectangles are in the whole sequence."""

from __future__ import annotations

import torch

from quorum_attention.decomposition import Task


def positions(
    task: Task, start: int, stop: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Global positions of the local ones ``start`` to ``stop``."""
    found = torch.empty(stop - start, dtype=dtype, device=device)
    for first, last, local in task.segments(start, stop):
        at = local - start
        torch.arange(first, last, device=device, out=found[at : at + last - first])
    return found
