"""Tensors in the memory layouts that operators need."""

from __future__ import annotations

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.kernels.tensors import broadcast_strides

_WORD_BYTES = 16


def zero_unit_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same view with stride 0 in dimensions of size 1 (the last one
    excepted).

    Some operators require every stride to fit 32 bits, even those that are never used.
    """
    if 1 not in tensor.shape[:-1]:
        return tensor
    strides = (*broadcast_strides(tensor)[:-1], tensor.stride(-1))
    return tensor.as_strided(tensor.shape, strides)


def in_layout_of(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without gaps, its dimensions in the memory order of ``model``;
    copied if needed.

    Operators allocate the output for a query ``model`` in this layout.
    """
    order = sorted(range(model.dim()), key=model.stride)
    order.reverse()
    back = [order.index(dim) for dim in range(model.dim())]
    return tensor.permute(order).contiguous().permute(back)


def token_major(tensor: torch.Tensor) -> torch.Tensor:
    """Return a (b, h, rows, d) tensor that is stored as (b, rows, h, d); copied if
    needed."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def aligned_bias(bias: torch.Tensor, n_keys: int) -> torch.Tensor:
    """Return ``bias`` as operators with vector loads need it; copied only where it is
    not so already.

    It has all ``n_keys`` columns, its last dimension is contiguous, its address and all
    other strides are multiples of 16 bytes, and its strides fit 32 bits.
    """
    word = max(1, _WORD_BYTES // bias.element_size())  # in elements
    if bias.shape[-1] == n_keys and _has_aligned_rows(bias, word):
        return bias
    rows = bias.shape[:-1]
    shape = (*rows, round_up(n_keys, word))
    padded = torch.empty(shape, dtype=bias.dtype, device=bias.device)
    copy = padded[..., :n_keys]
    copy.copy_(bias.expand(*rows, n_keys))
    return copy


def _has_aligned_rows(bias: torch.Tensor, word: int) -> bool:
    """Whether rows are contiguous, begin at multiples of a word and are less than 2**31
    apart."""
    if bias.stride(-1) != 1 or bias.data_ptr() % _WORD_BYTES:
        return False
    for size, stride in zip(bias.shape[:-1], bias.stride()[:-1], strict=True):
        if size > 1 and (stride % word or stride >= 2**31):
            return False
    return True
