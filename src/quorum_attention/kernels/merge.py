"""Merge softmax statistics of disjoint key sets, in place and in any order (paper,
section 3).

With ``(out, lse)`` of two disjoint key sets, ``lse' = logaddexp(lse, lse_i)`` and
``out' = w out + w_i out_i`` where ``w = exp(lse - lse') = sigmoid(lse - lse_i)``, and
``w_i`` likewise. The exponential of an lse itself is never formed, so scores of any
size are safe. The weights are computed independently: ``1 - w_i`` would lose the digits
of a small ``w``, and a large value with a small weight would then distort the result.
"""

from __future__ import annotations

import math

import torch

from quorum_attention.kernels.tensors import BLOCK_BYTES, Block, row_blocks
from quorum_attention.kernels.triton_launch import (
    launch_add,
    launch_mend,
    launch_merge,
    triton_takes,
)

MERGE_WORKSPACE_BYTES = 3 * BLOCK_BYTES
"""Upper bound of the bytes ``merge_`` and ``add_`` allocate at any one time."""


def empty_(out: torch.Tensor, lse: torch.Tensor) -> None:
    """Make statistics those of an empty key set: ``out`` 0 and ``lse`` -inf, in
    place."""
    out.zero_()
    lse.fill_(-torch.inf)


def mend_(out: torch.Tensor, lse: torch.Tensor) -> None:
    """Make ``lse`` (b, h, rows) NaN, in place, where it is -inf and the row of ``out``
    (b, h, rows, dv) begins with NaN: as that of a row with a score of NaN or +inf, and
    not of one without keys."""
    if triton_takes(out, lse):
        launch_mend(out, lse)
        return
    is_nan = torch.isneginf(lse) & out[..., 0].isnan()
    lse.masked_fill_(is_nan, torch.nan)


def merge_(
    out: torch.Tensor, lse: torch.Tensor, out_i: torch.Tensor, lse_i: torch.Tensor
) -> None:
    """Merge the statistics of more keys into running ones, in place.

    Args:
        out: running output (b, h, rows, dv), fp32 or fp64; any strides. One of 16 bits
            is merged in fp32 and rounded once each time, so it is for two sets of keys.
        lse: running natural-log log-sum-exp (b, h, rows), fp32 or fp64.
        out_i: normalised output over the new keys, same shape, any floating dtype.
        lse_i: its log-sum-exp, same shape as ``lse``; -inf (with ``out_i`` 0) in rows
            without keys.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    is_like = out.shape == out_i.shape and lse.shape == lse_i.shape
    if not is_like or out.shape[:3] != lse.shape:
        raise ValueError(
            f"statistics of shapes {tuple(out_i.shape)}, {tuple(lse_i.shape)} cannot "
            f"be merged into {tuple(out.shape)}, {tuple(lse.shape)}"
        )
    if triton_takes(out, out_i):
        launch_merge(out, lse, out_i, lse_i)
        return
    if out.dtype.itemsize == 2:
        wide_out = out.float()
        merge_(wide_out, lse, out_i, lse_i)
        out.copy_(wide_out)
        return
    # On a GPU the host would have to wait.
    if not out.is_cuda and bool(torch.isneginf(lse).all()):
        # All rows are empty: copying is half the traffic.
        out.copy_(out_i)
        lse.copy_(lse_i)
        return
    batch, heads, rows, width = out.shape
    row_bytes = max(1, width) * out.element_size()
    for block in row_blocks(batch, heads, rows, row_bytes):
        _merge_block_(
            out[block],
            lse[block],
            out_i[block],
            lse_i[block],
        )


def _merge_block_(
    out: torch.Tensor, lse: torch.Tensor, out_i: torch.Tensor, lse_i: torch.Tensor
) -> None:
    lse_i = lse_i.to(lse.dtype)
    # The difference of two empty rows would be NaN. Adding an empty row changes
    # nothing.
    difference = lse_i - lse  # (b, h, rows)
    difference.masked_fill_(lse_i == -torch.inf, -torch.inf)
    weight_i = difference.sigmoid()
    weight = difference.neg_()
    weight.sigmoid_()
    torch.logaddexp(lse, lse_i, out=lse)
    weight = weight.to(out.dtype).unsqueeze(-1)  # (b, h, rows, 1)
    weight_i = weight_i.to(out.dtype).unsqueeze(-1)
    out.mul_(weight)
    out.addcmul_(out_i.to(out.dtype), weight_i)


def add_(
    target: torch.Tensor,
    source: torch.Tensor,
    alpha: float = 1.0,
    unscale: torch.Tensor | None = None,
    overflow: torch.Tensor | None = None,
) -> None:
    """``target += alpha * unscale * source`` for (b, h, rows, d) tensors, in place.

    Args:
        target: fp32 or fp64; any strides.
        source: same shape, any floating dtype.
        unscale: (b or 1, h / g) fp32: one factor for g neighbouring heads; None is 1.
        overflow: shaped like ``unscale``, int32; 1 is set where any element of
            ``source`` is not finite; None: not checked.
    """
    if target.dtype == torch.float32 and triton_takes(target, source):
        launch_add(target, source, alpha, unscale, overflow)
        return
    if unscale is None and overflow is None and source.dtype == target.dtype:
        target.add_(source, alpha=alpha)
        return
    batch, heads, rows, width = target.shape
    # In blocks, because a 16-bit source is first converted to the target's dtype.
    row_bytes = max(1, width) * target.element_size()
    for block in row_blocks(batch, heads, rows, row_bytes):
        part = source[block].to(target.dtype)
        if overflow is not None:
            _set_overflow_(overflow, part, block, heads)
        if unscale is not None:
            factors = by_head(unscale, heads).expand(
                batch,
                heads,
                1,
                1,
            )
            part = part * factors[block[:2]]
        target[block].add_(part, alpha=alpha)


def _set_overflow_(
    overflow: torch.Tensor, part: torch.Tensor, block: Block, heads: int
) -> None:
    """Set ``overflow`` to 1 for the heads of a block where ``part`` is not finite."""
    first_entry = block[0].start
    first_head = block[1].start
    group = heads // overflow.shape[1]
    has_one_row = overflow.shape[0] == 1
    magnitudes = part.abs()
    largest = magnitudes.flatten(2).amax(-1)  # (b, h)
    # NaN is not below infinity either.
    is_finite = largest < math.inf
    for entry, head in is_finite.logical_not_().nonzero().tolist():
        row = 0 if has_one_row else first_entry + entry
        key_head = (first_head + head) // group
        overflow[row, key_head] = 1


def by_head(unscale: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (b, h / g) factors as (b, h, 1, 1), a view wherever there is one."""
    batch, key_heads = unscale.shape
    group = heads // key_heads
    by_key_head = unscale.unsqueeze(2)  # (b, h / g, 1)
    shared = by_key_head.expand(batch, key_heads, group)
    return shared.reshape(batch, heads, 1, 1)
