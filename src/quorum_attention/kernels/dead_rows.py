"""Rows that a bias leaves no key."""

from __future__ import annotations

import math

import torch

from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.tensors import BLOCK_BYTES, row_blocks

BASE_TWO_LOWEST = torch.finfo(torch.float32).min * math.log(2.0)
"""Kernels that compute exponentials to base 2 in fp32 treat this score, and lower ones,
as -inf. Masks in bf16 and fp32 that hold their dtype's lowest number instead of -inf
reach it."""


def dead_rows(
    bias: torch.Tensor, n_rows: int, causal: bool, lowest: float = -math.inf
) -> torch.Tensor:
    """Return the rows that ``bias`` (together with the causal mask, if any) leaves no
    key.

    Args:
        bias: additive mask (b or 1, h or 1, n_rows or 1, n_keys or 1), at least one
            key; -inf masks a pair.
        n_rows: query rows of the rectangle.
        causal: the rectangle is a causal square.
        lowest: a value this low or lower masks a pair as well.

    Returns:
        bool tensor broadcastable to (b, h, n_rows), True where a row has no key.
    """
    if not causal:
        # NaN is not -inf: a row whose mask holds NaN is not dead, and its result is
        # NaN.
        return bias.amax(dim=-1) <= lowest
    return _first_keys(bias, lowest) > torch.arange(n_rows, device=bias.device)


def dead_rows_bytes(shape: CallShape, extent: Extent) -> int:
    """Return an upper bound of the bytes that ``dead_rows`` takes, result and
    temporaries, for fp64."""
    if shape.bias is None:
        return 0
    entries = extent.batch if shape.bias.batch else 1
    rows = entries * extent.query_heads * extent.max_queries
    result = rows * 9
    if not shape.is_causal:
        return result
    block = min(BLOCK_BYTES, rows * extent.max_keys)
    return result + extent.max_queries * 8 + 2 * block


def _first_keys(bias: torch.Tensor, lowest: float) -> torch.Tensor:
    """Return the index of the first key each row keeps, int64 (b, h, rows); the largest
    int64 if there is none."""
    batch, heads, rows, keys = bias.shape
    no_key = torch.iinfo(torch.int64).max
    first_keys = torch.empty(
        (batch, heads, rows), dtype=torch.int64, device=bias.device
    )
    for block in row_blocks(batch, heads, rows, keys):
        is_masked = bias[block] <= lowest
        is_kept = is_masked.logical_not_()
        has_no_key = is_kept.any(dim=-1).logical_not_()
        # argmax returns the first of several ones.
        first_kept = is_kept.view(torch.uint8).argmax(dim=-1)
        first_keys[block] = first_kept.masked_fill_(has_no_key, no_key)
    return first_keys
