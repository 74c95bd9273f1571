"""Which rows of a rectangle an additive mask leaves without any key."""

from __future__ import annotations

import math

import torch

from quorum_attention.kernels.tensors import BLOCK_BYTES, row_blocks

BASE_TWO_LOWEST = torch.finfo(torch.float32).min * math.log(2.0)
"""Kernels that compute exponentials to base 2 in fp32 treat this score, and lower ones, as -inf.
Masks in bf16 and fp32 that hold their dtype's lowest number instead of -inf reach it."""


def dead_rows(
    bias: torch.Tensor, n_rows: int, causal: bool, lowest: float = -math.inf
) -> torch.Tensor:
    """Rows that ``bias`` (together with the causal mask, if any) leaves no key.

    Args:
        bias: additive mask (b or 1, h or 1, n_rows or 1, n_keys or 1), at least one key; -inf
            masks a pair.
        n_rows: query rows of the rectangle.
        causal: the rectangle is a causal square.
        lowest: a value this low or lower masks a pair as well.

    Returns:
        bool tensor broadcastable to (b, h, n_rows), True where a row has no key.
    """
    if not causal:
        # NaN is not -inf: a row whose mask holds NaN is not dead, and its result is NaN.
        return bias.amax(dim=-1) <= lowest
    return _first_key(bias, lowest) > torch.arange(n_rows, device=bias.device)


def dead_rows_bytes(batch: int, heads: int, rows: int, keys: int, causal: bool) -> int:
    """Upper bound of the bytes that ``dead_rows`` takes, result and temporaries, for fp64."""
    block = min(BLOCK_BYTES, batch * heads * rows * keys)
    return batch * heads * rows * 9 + (rows * 8 + 2 * block if causal else 0)


def _first_key(bias: torch.Tensor, lowest: float) -> torch.Tensor:
    """Index of the first key each row keeps, int64 (b, h, rows); the largest int64 if none."""
    batch, heads, rows, keys = bias.shape
    never = torch.iinfo(torch.int64).max
    first = torch.empty((batch, heads, rows), dtype=torch.int64, device=bias.device)
    for block in row_blocks(batch, heads, rows, keys):
        alive = (bias[block] <= lowest).logical_not_()
        # argmax returns the first of several ones.
        first[block] = alive.view(torch.uint8).argmax(dim=-1)
        first[block].masked_fill_(~alive.any(dim=-1), never)
    return first


def aligned_bias(bias: torch.Tensor, n_keys: int) -> torch.Tensor:
    """``bias`` as operators with vector loads need it; copied only where it is not so already.

    It has all ``n_keys`` columns, its last dimension is contiguous, its address and all other
    strides are multiples of 16 bytes, and its strides fit 32 bits.
    """
    step = max(1, 16 // bias.element_size())
    strides = [s for s, n in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if n > 1]
    if (
        bias.shape[-1] == n_keys
        and bias.stride(-1) == 1
        and bias.data_ptr() % 16 == 0
        and all(s % step == 0 and s < 2**31 for s in strides)
    ):
        return bias
    rows = bias.shape[:-1]
    padded = torch.empty((*rows, -(-n_keys // step) * step), dtype=bias.dtype, device=bias.device)
    padded[..., :n_keys].copy_(bias.expand(*rows, n_keys))
    return padded[..., :n_keys]
