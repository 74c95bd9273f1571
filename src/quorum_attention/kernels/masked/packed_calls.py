"""Runs the calls of a ``Packing``: gathers rows, calls a kernel, writes the results back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quorum_attention.kernels.call_shape import BiasShape, CallShape, Extent, state_dtype
from quorum_attention.kernels.masked.cell_rows import CellPlaces, CellResults, RowReader
from quorum_attention.kernels.masked.cells import Bucket
from quorum_attention.kernels.masked.packing import Packing
from quorum_attention.kernels.masked.whole_calls import WholeCallKernel
from quorum_attention.kernels.operator_call import Call, Saved, Three
from quorum_attention.kernels.operator_inputs import four_dims
from quorum_attention.kernels.protocol import Kernel


def packed_forward(
    packing: Packing, kernel: Kernel, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """``Kernel.whole_forward`` by packed calls of ``kernel``, of entries from ``call.first_entry``
    on."""
    readers = [RowReader(tensor) for tensor in call.inputs]
    out = CellResults(call.query, call.value.shape[-1])
    lse = CellResults(call.query, 1, -torch.inf)
    for cells in _packed_cells(packing, call):
        queries = CellPlaces(cells, cells.queries, call)
        keys = CellPlaces(cells, cells.keys, call)
        packed_call = _packed_call(cells, call, readers, queries, keys)
        part_out, part_lse = kernel.whole_forward(packed_call)
        out.write(queries, part_out)
        lse.write(queries, part_lse.unsqueeze(-1))
    dtype = call.query.dtype
    return out.tensor(call.stored or dtype), lse.tensor(state_dtype(dtype)).squeeze(-1)


def packed_backward(packing: Packing, kernel: Kernel, call: Call, saved: Saved) -> Three:
    """``Kernel.whole_backward`` by packed calls of ``kernel``; arguments as of the forward."""
    readers = [RowReader(tensor) for tensor in call.inputs]
    grad_out = RowReader(saved.grad_out)
    out = RowReader(saved.out)
    lse = RowReader(saved.lse.unsqueeze(-1))
    grad_query, grad_key, grad_value = (
        CellResults(tensor, tensor.shape[-1]) for tensor in call.inputs
    )
    for cells in _packed_cells(packing, call):
        queries = CellPlaces(cells, cells.queries, call)
        keys = CellPlaces(cells, cells.keys, call)
        packed_call = _packed_call(cells, call, readers, queries, keys)
        upstream = grad_out.at(queries)
        if cells.queries.is_filled:
            # Copies of a query have no part in the gradients of keys.
            upstream = upstream.masked_fill(queries.is_copy[:, None, :, None], 0.0)
        packed_saved = Saved(upstream, out.at(queries), lse.at(queries).squeeze(-1))
        part_query, part_key, part_value = kernel.whole_backward(packed_call, packed_saved)
        grad_query.write(queries, part_query)
        grad_key.write(keys, part_key)
        grad_value.write(keys, part_value)
    dtype = call.stored or call.query.dtype
    return grad_query.tensor(dtype), grad_key.tensor(dtype), grad_value.tensor(dtype)


def _packed_cells(packing: Packing, call: Call) -> Sequence[Bucket]:
    """The cells of each packed call of a call; the planner counts their bytes by the same sizes."""
    query, key, value = call.inputs
    bias: BiasShape | None = None
    if call.bias is not None:
        is_wide = call.bias.dtype != query.dtype
        bias = BiasShape(batch=True, heads=True, rows=True, wide=is_wide)
    heads = query.shape[1], key.shape[1]
    shape = CallShape(
        query.device.type,
        query.dtype,
        *heads,
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        bias=bias,
    )
    entries = slice(call.first_entry, call.first_entry + query.shape[0])
    return list(packing.chunks(shape, heads, entries))


def _packed_call(
    cells: Bucket,
    call: Call,
    readers: Sequence[RowReader],
    queries: CellPlaces,
    keys: CellPlaces,
) -> Call:
    """A kernel call of gathered rows, with the call's own mask and that of the cells.

    Args:
        readers: of query, key and value.
    """
    query, key, value = readers
    rows = query.at(queries), key.at(keys), value.at(keys)
    bias = None if call.bias is None else _bias_at(four_dims(call.bias), queries, keys)
    masked = _masked_pairs(cells, queries, keys)
    if masked is not None and bias is None:
        bias = torch.zeros(masked.shape, dtype=call.query.dtype, device=masked.device)
        bias.masked_fill_(masked, -torch.inf)
    elif masked is not None and bias is not None:
        bias = bias.masked_fill(masked, -torch.inf)
    return Call(*rows, cells.causal, call.scale, bias, call.stored)


def _masked_pairs(cells: Bucket, queries: CellPlaces, keys: CellPlaces) -> torch.Tensor | None:
    """Which pairs of cells are masked, (cells, 1, queries or 1, keys); None: none."""
    masked = keys.is_copy[:, None]
    if cells.rule is not None:
        entries = torch.from_numpy(cells.entries).to(masked.device)
        masked = masked | ~cells.rule.keeps(entries, queries.tokens, keys.tokens)
    elif cells.causal or not cells.keys.is_filled:
        return None
    return masked.unsqueeze(1)


def _bias_at(bias: torch.Tensor, queries: CellPlaces, keys: CellPlaces) -> torch.Tensor:
    """The part of a mask (b or 1, h or 1, n or 1, m or 1) for the pairs of cells, (cells, h or 1,
    n or 1, m or 1)."""
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


class PackedKernel(WholeCallKernel):
    """Attention under a mask with a ``Packing``; other arguments as of ``WholeCallKernel``."""

    def __init__(self, packing: Packing, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.packing = packing

    def masked_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``WholeCallKernel``."""
        return packed_forward(self.packing, self.base, call)

    def masked_backward(self, call: Call, saved: Saved) -> Three:
        """See ``WholeCallKernel``."""
        return packed_backward(self.packing, self.base, call, saved)

    def masked_workspace_bytes(self, shape: CallShape, extent: Extent, *, backward: bool) -> int:
        """See ``WholeCallKernel``."""
        return self.packing.workspace_bytes(self.base, shape, extent, backward=backward)
