"""Rows of torch's CPU operator that have NaN, infinite or no scores, computed again."""

from __future__ import annotations

from dataclasses import replace

import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.operator_call import Call, whole_task
from quorum_attention.kernels.operator_sizes import OperatorSizes
from quorum_attention.kernels.reference import forward_block
from quorum_attention.kernels.score_tiles import (
    QueryBlock,
    ScoreTransform,
    TileLimits,
    query_blocks,
)

# Odd rows are computed again so many at a time, by tiles of these limits.
_LIMITS = TileLimits(pairs=1 << 15, rows=64, keys=128)
_TRANSFORM = ScoreTransform(tiles=_LIMITS)
_WORKSPACE_BYTES = 1 << 20
# Bytes for each row of the call, odd or not.
_ROW_BYTES = 3


def mend_odd_rows_(out: torch.Tensor, lse: torch.Tensor, call: Call) -> None:
    """Correct, in place, the rows that have NaN, infinite or no scores.

    A row with a score of NaN or +inf has to be NaN; a row whose scores are all -inf has
    to be 0 with lse -inf. torch's CPU operator differs: among few keys it ignores NaN
    when it looks for the maximum, it returns 0 with lse 0 if there is no maximum, and
    its 16-bit exponential turns NaN into 0. In all these rows lse is 0, NaN or
    infinite; nothing else of the other rows is read.

    Args:
        out: (b, h, lq, dv), as the operator returned it.
        lse: (b, h, lq), as the operator returned it; rows with -inf are right already.
        call: the operator's arguments.
    """
    is_odd = lse.isfinite().logical_not_()
    is_odd.logical_or_(lse == 0.0)
    is_odd.logical_and_(lse != -torch.inf)
    is_odd_anywhere = is_odd.flatten(0, 1).any(0)  # (lq,)
    odd_rows = is_odd_anywhere.nonzero().flatten()
    blocks = (odd_rows // _LIMITS.rows).unique()
    task = whole_task(call)
    for number in blocks.tolist():
        start = number * _LIMITS.rows
        stop = min(start + _LIMITS.rows, lse.shape[2])
        rows = Rectangle(start, stop, 0, call.key.shape[2], call.is_causal)
        rows_of_task = replace(task, rectangles=(rows,))
        for block in query_blocks(rows_of_task, lse, _TRANSFORM):
            _mend_block_(block, out, lse, is_odd)


def _mend_block_(
    block: QueryBlock, out: torch.Tensor, lse: torch.Tensor, is_odd: torch.Tensor
) -> None:
    """Compute the rows of a block again, and correct those that are odd and wrong, in
    place."""
    right_out, right_lse = forward_block(block)
    block_out = block.of_rows(out)
    block_lse = block.of_rows(lse)
    right_lse = right_lse.view(block_lse.shape)
    right_out = right_out.view(block_out.shape)
    is_wrong = right_lse.isfinite().logical_not_()
    is_wrong.logical_and_(block.of_rows(is_odd))
    block_out[is_wrong] = right_out[is_wrong].to(out.dtype)
    block_lse[is_wrong] = right_lse[is_wrong]


def mending_bytes(sizes: OperatorSizes) -> int:
    """Return an upper bound of the bytes ``mend_odd_rows_`` allocates at any one
    time."""
    number_bytes = sizes.state_itemsize + 2 * sizes.itemsize
    row_bytes = sizes.shape.value_dim * number_bytes + 4 * sizes.state_itemsize
    rows_of_a_block = min(_LIMITS.rows, sizes.extent.max_queries)
    results = sizes.lanes * rows_of_a_block * row_bytes
    flags = sizes.rows * _ROW_BYTES
    return _WORKSPACE_BYTES + results + flags
