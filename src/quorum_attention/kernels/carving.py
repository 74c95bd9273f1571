"""Tensors that are views of one piece of memory (n_bytes,) uint8."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from quorum_attention.arithmetic import round_up

ALIGNMENT = 256
"""Tensors one behind the other begin at multiples of this many bytes."""


def aligned(n_bytes: int) -> int:
    """Return ``n_bytes`` rounded up to the alignment."""
    return round_up(n_bytes, ALIGNMENT)


def view_at(
    memory: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor over the bytes of ``memory`` from ``start`` on."""
    n_bytes = math.prod(shape) * dtype.itemsize
    return memory[start : start + n_bytes].view(dtype).view(shape)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that tensors take one behind the other."""
    return sum(aligned(tensor.nbytes) for tensor in tensors)


def views_of(
    memory: torch.Tensor, tensors: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Return tensors like ``tensors``, one behind the other in ``memory``."""
    views: list[torch.Tensor] = []
    start = 0
    for tensor in tensors:
        views.append(view_at(memory, start, tensor.shape, tensor.dtype))
        start += aligned(tensor.nbytes)
    return views
