"""Runs whole calls by the cells of a ``Packing``: gathered rows are the batch entries
of kernel calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.masked.cell_rows import CellPlaces
from quorum_attention.kernels.masked.cells import Bucket
from quorum_attention.kernels.masked.packing import Packing
from quorum_attention.kernels.masked.whole_calls import WholeCallKernel, WholeCallPart
from quorum_attention.kernels.operator_call import Call, four_dims


class PackedKernel(WholeCallKernel):
    """Attention under a mask with a ``Packing``; other arguments as of
    ``WholeCallKernel``."""

    def __init__(self, packing: Packing, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.packing = packing

    def parts(self, call: Call, shape: CallShape) -> Iterator[WholeCallPart]:
        """See ``WholeCallKernel``."""
        entries = slice(call.first_entry, call.first_entry + shape.batch)
        heads = (shape.heads, shape.kv_heads)
        for cells in self.packing.chunks(shape, heads, entries):
            yield _PackedCells(cells, call)

    def parts_workspace_bytes(
        self, shape: CallShape, extent: Extent, *, backward: bool
    ) -> int:
        """See ``WholeCallKernel``."""
        return self.packing.workspace_bytes(
            self.base,
            shape,
            extent,
            backward=backward,
        )


class _PackedCells(WholeCallPart):
    """The kernel call of some cells."""

    def __init__(self, cells: Bucket, call: Call) -> None:
        self._cells = cells
        self.causal = cells.causal
        self.queries: CellPlaces = CellPlaces(cells, cells.queries, call)
        self.keys: CellPlaces = CellPlaces(cells, cells.keys, call)

    def bias(self, call: Call) -> torch.Tensor | None:
        """See ``WholeCallPart``: it masks copies of keys, and pairs the rule does not
        keep."""
        masked = self._masked_pairs()
        if call.bias is not None:
            bias = _bias_at(four_dims(call.bias), self.queries, self.keys)
            return bias if masked is None else bias.masked_fill(masked, -torch.inf)
        if masked is None:
            return None
        bias = torch.zeros(
            masked.shape,
            dtype=call.query.dtype,
            device=masked.device,
        )
        return bias.masked_fill_(masked, -torch.inf)

    def _masked_pairs(self) -> torch.Tensor | None:
        """Which pairs of cells are masked, (cells, 1, queries or 1, keys); None:
        none."""
        cells = self._cells
        if cells.bias_shape is None:
            return None
        masked = self.keys.is_copy[:, None]
        if cells.rule is not None:
            entries = torch.from_numpy(cells.entries).to(masked.device)
            masked = masked | ~cells.rule.keeps(
                entries, self.queries.tokens, self.keys.tokens
            )
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
