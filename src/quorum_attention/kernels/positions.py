"""Global positions of a task's tokens."""

from __future__ import annotations

import torch

from quorum_attention.decomposition import Task


def positions(
    task: Task, start: int, stop: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Global positions (stop - start,) of the local positions ``start`` to ``stop``."""
    segments = task.segments(start, stop)
    if len(segments) == 1:
        return torch.arange(*segments[0][:2], dtype=dtype, device=device)
    found = torch.empty(stop - start, dtype=dtype, device=device)
    for first, last, local in segments:
        at = local - start
        torch.arange(first, last, device=device, out=found[at : at + last - first])
    return found
