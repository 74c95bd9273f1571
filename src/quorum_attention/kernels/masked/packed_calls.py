"""Kernel calls of cells: gathered rows are their batch entries."""

from __future__ import annotations

from functools import partial

import torch

from quorum_attention.kernels.masked.cell_rows import CellPlaces
from quorum_attention.kernels.masked.cells import Bucket
from quorum_attention.kernels.masked.whole_calls import WholeCallPart
from quorum_attention.kernels.operator_call import Call, four_dims


def packed_part(cells: Bucket, call: Call) -> WholeCallPart:
    """The kernel call of some cells of a call."""
    queries = CellPlaces(cells, cells.queries, call)
    keys = CellPlaces(cells, cells.keys, call)
    make_bias = partial(_bias_of, cells, queries, keys, call)
    return WholeCallPart(queries, keys, cells.causal, make_bias)


def _bias_of(
    cells: Bucket, queries: CellPlaces, keys: CellPlaces, call: Call
) -> torch.Tensor | None:
    """The bias of cells: it masks copies of keys, and pairs the rule does not keep."""
    masked = _masked_pairs(cells, queries, keys)
    if call.bias is not None:
        bias = _bias_at(four_dims(call.bias), queries, keys)
        return bias if masked is None else bias.masked_fill(masked, -torch.inf)
    if masked is None:
        return None
    bias = torch.zeros(
        masked.shape,
        dtype=call.query.dtype,
        device=masked.device,
    )
    return bias.masked_fill_(masked, -torch.inf)


def _masked_pairs(
    cells: Bucket, queries: CellPlaces, keys: CellPlaces
) -> torch.Tensor | None:
    """Which pairs of cells are masked, (cells, 1, queries or 1, keys); None: none."""
    if cells.bias_shape is None:
        return None
    masked = keys.is_copy[:, None]
    if cells.rule is not None:
        entries = torch.from_numpy(cells.entries).to(masked.device)
        masked = masked | ~cells.rule.keeps(entries, queries.tokens, keys.tokens)
    return masked.unsqueeze(1)


def _bias_at(bias: torch.Tensor, queries: CellPlaces, keys: CellPlaces) -> torch.Tensor:
    """The part of a mask (b or 1, h or 1, n or 1, m or 1) for the pairs of cells,
    (cells, h or 1, n or 1, m or 1)."""
    n_entries, n_heads, n_rows, n_columns = bias.shape
    entries = queries.entries
    rows = queries.tokens
    columns = keys.tokens
    if n_entries == 1:
        entries = torch.zeros_like(entries)
    if n_rows == 1:
        rows = torch.zeros_like(rows[:, :1])
    if n_columns == 1:
        columns = torch.zeros_like(columns[:, :1])
    heads = torch.arange(n_heads, device=bias.device)
    return bias[
        entries[:, None, None, None],
        heads[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
