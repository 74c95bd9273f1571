"""Rows of torch's CPU operator that have NaN, infinite or no scores, computed again."""

from __future__ import annotations

from operator import itemgetter

import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.operator_call import Call, OutLse, part_of
from quorum_attention.kernels.operator_sizes import OperatorSizes
from quorum_attention.kernels.reference import TiledKernel
from quorum_attention.kernels.score_tiles import QueryBlock, ScoreTransform, TileLimits
from quorum_attention.kernels.torch_private import as_it_is

# Odd rows are computed again so many at a time, by tiles of these limits.
_LIMITS = TileLimits(pairs=1 << 15, rows=64, keys=128)
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
    for block in blocks.tolist():
        start = block * _LIMITS.rows
        stop = min(start + _LIMITS.rows, lse.shape[2])
        rows = (slice(None), slice(None), slice(start, stop))
        right_out, right_lse = _computed_again(call, start, stop, out.dtype)
        is_wrong = right_lse.isfinite().logical_not_()
        is_wrong.logical_and_(is_odd[rows])
        block_out = out[rows]
        block_lse = lse[rows]
        block_out[is_wrong] = right_out[is_wrong]
        block_lse[is_wrong] = right_lse[is_wrong]


def _computed_again(call: Call, start: int, stop: int, dtype: torch.dtype) -> OutLse:
    """Return (out, lse) of the query rows from ``start`` to ``stop`` by the
    reference."""

    def at_or_before(block: QueryBlock, keys: slice) -> torch.Tensor:
        rows = torch.arange(block.rows.start, block.rows.stop)
        queries = start + rows.unsqueeze(-1)
        columns = torch.arange(keys.start, keys.stop)
        return columns <= queries

    keeps = at_or_before if call.is_causal else None
    transform = ScoreTransform(keeps=keeps, tiles=_LIMITS)
    rectangle = Rectangle(start, stop, 0, call.key.shape[2])
    part = call.mapped(
        itemgetter((slice(None), slice(None), slice(start, stop))),
        as_it_is,
        # The rows of a causal call are no causal call: ``at_or_before`` says which
        # pairs they have.
        causal=False,
        bias=part_of(call.bias, rectangle),
        stored=dtype,
    )
    return TiledKernel(transform).whole_forward(part)


def mending_bytes(sizes: OperatorSizes) -> int:
    """Return an upper bound of the bytes ``mend_odd_rows_`` allocates at any one
    time."""
    number_bytes = sizes.state_itemsize + 2 * sizes.itemsize
    row_bytes = sizes.shape.value_dim * number_bytes + 4 * sizes.state_itemsize
    rows_of_a_block = min(_LIMITS.rows, sizes.extent.max_queries)
    results = sizes.lanes * rows_of_a_block * row_bytes
    flags = sizes.rows * _ROW_BYTES
    return _WORKSPACE_BYTES + results + flags
