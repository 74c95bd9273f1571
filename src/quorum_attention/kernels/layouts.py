"""Memory layouts that operators need but do not check for."""

from __future__ import annotations

import torch


def zero_unit_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same view with stride 0 in dimensions of size 1 (the last one excepted).

    Some operators require every stride to fit 32 bits, even those that are never used.
    """
    strides = [0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    strides[-1] = tensor.stride(-1)
    return tensor.as_strided(tensor.shape, strides)


def in_layout_of(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """``tensor`` without gaps, its dimensions in the memory order of ``model``; copied if needed.

    Operators allocate the output for a query ``model`` in this layout.
    """
    shape = tensor.shape
    order = sorted(range(tensor.dim()), key=lambda dim: model.stride(dim))
    strides = [0] * tensor.dim()
    step = 1
    for dim in order:
        strides[dim] = step
        step *= max(1, shape[dim])
    if all(n <= 1 or s == t for n, s, t in zip(shape, strides, tensor.stride(), strict=True)):
        return tensor
    copy = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def token_major(tensor: torch.Tensor) -> torch.Tensor:
    """A (b, h, rows, d) tensor that is stored as (b, rows, h, d); copied if needed."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
