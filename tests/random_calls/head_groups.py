"""Tensors (b, h, ...) by the query heads that share a key head."""

from __future__ import annotations

import torch


def sum_of_group(tensor: torch.Tensor, n_shared: int) -> torch.Tensor:
    """(b, h, ...) -> (b, kv_heads, ...): the sum over the query heads of a key head."""
    if n_shared <= 1:
        return tensor
    return tensor.unflatten(1, (-1, n_shared)).sum(2)


def largest_of_group(tensor: torch.Tensor, n_shared: int) -> torch.Tensor:
    """(b, h, ...) -> (b, h, ...): for each query head the largest among those of its
    key head."""
    if n_shared <= 1:
        return tensor
    largest = tensor.unflatten(1, (-1, n_shared)).amax(2)
    return largest.repeat_interleave(n_shared, 1)


def first_of_group(tensor: torch.Tensor, n_shared: int) -> torch.Tensor:
    """(b, h, ...) -> (b, kv_heads, ...), of what is the same in all query heads of a
    key head."""
    return tensor[:, ::n_shared]
