"""Runs the calls of a ``Packing``: gathers rows, calls a kernel, writes the results back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quorum_attention.kernels.masked.cells import Bucket, CellSide
from quorum_attention.kernels.masked.packing import Packing
from quorum_attention.kernels.masked.whole_calls import WholeCallKernel
from quorum_attention.kernels.operator_inputs import four_dims
from quorum_attention.kernels.protocol import (
    BiasShape,
    Call,
    CallShape,
    Extent,
    Kernel,
    Saved,
    Three,
    state_dtype,
)
from quorum_attention.kernels.torch_private import no_torch_modes


def packed_forward(
    packing: Packing, kernel: Kernel, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """``Kernel.whole_forward`` by packed calls of ``kernel``, of entries from ``call.first_entry``
    on."""
    query, key, value = map(_RowReader, call.inputs)
    out, lse = (
        _CellResults(call.query, call.value.shape[-1]),
        _CellResults(call.query, 1, -torch.inf),
    )
    for cells in _calls(packing, call):
        queries, keys = (
            _CellPlaces(cells, cells.queries, call),
            _CellPlaces(cells, cells.keys, call),
        )
        three = query.at(queries), key.at(keys), value.at(keys)
        part_out, part_lse = kernel.whole_forward(_call_of(cells, call, three, (queries, keys)))
        out.write(queries, part_out)
        lse.write(queries, part_lse.unsqueeze(-1))
    dtype = call.query.dtype
    return out.tensor(call.stored or dtype), lse.tensor(state_dtype(dtype)).squeeze(-1)


def packed_backward(packing: Packing, kernel: Kernel, call: Call, saved: Saved) -> Three:
    """``Kernel.whole_backward`` by packed calls of ``kernel``; arguments as of the forward."""
    query, key, value = map(_RowReader, call.inputs)
    grad_out, out, lse = map(_RowReader, (saved.grad_out, saved.out, saved.lse.unsqueeze(-1)))
    results = [_CellResults(tensor, tensor.shape[-1]) for tensor in call.inputs]
    for cells in _calls(packing, call):
        queries, keys = (
            _CellPlaces(cells, cells.queries, call),
            _CellPlaces(cells, cells.keys, call),
        )
        three = query.at(queries), key.at(keys), value.at(keys)
        upstream = grad_out.at(queries)
        if cells.queries.is_filled:
            # Copies of a query have no part in the gradients of keys.
            upstream = upstream.masked_fill(queries.is_copy[:, None, :, None], 0.0)
        of_rows = Saved(upstream, out.at(queries), lse.at(queries).squeeze(-1))
        grads = kernel.whole_backward(_call_of(cells, call, three, (queries, keys)), of_rows)
        for result, places, grad in zip(results, (queries, keys, keys), grads, strict=True):
            result.write(places, grad)
    dtype = call.stored or call.query.dtype
    grad_query, grad_key, grad_value = (result.tensor(dtype) for result in results)
    return grad_query, grad_key, grad_value


def _calls(packing: Packing, call: Call) -> Sequence[Bucket]:
    """The cells of each packed call of a call; the planner counts their bytes by the same sizes."""
    query, key, value = call.inputs
    mask = None
    if call.bias is not None:
        wide = call.bias.dtype != query.dtype
        mask = BiasShape(batch=True, heads=True, rows=True, wide=wide)
    heads = query.shape[1], key.shape[1]
    widths = query.shape[3], value.shape[3]
    shape = CallShape(query.device.type, query.dtype, *heads, *widths, bias=mask)
    entries = slice(call.first_entry, call.first_entry + query.shape[0])
    return list(packing.chunks(shape, heads, entries))


class _CellPlaces:
    """Where the tokens of cells are, of one side.

    Attributes:
        entries: of each cell, counted from the call's first one, (cells,).
        tokens: positions, (cells, longest).
        run: the entries, if the cells are whole entries one after the other; otherwise None.
        is_all: whether the cells are whole entries.
        is_copy: which tokens are copies of a cell's last one, (cells, longest).
    """

    def __init__(self, cells: Bucket, side: CellSide, call: Call) -> None:
        numbers, device = cells.entries - call.first_entry, call.query.device
        first, n_cells = int(numbers[0]), len(numbers)
        self.is_all = side.is_all
        self.run: slice | None = None
        if self.is_all and int(numbers[-1]) - first + 1 == n_cells:
            self.run = slice(first, first + n_cells)
        with no_torch_modes():
            self.entries, self.tokens, counts = (
                torch.from_numpy(ids).to(device) for ids in (numbers, side.tokens, side.counts)
            )
        self._is_filled = side.is_filled
        self.is_copy = torch.arange(side.longest, device=device) >= counts[:, None]

    def rows(self, heads: int, n_tokens: int) -> torch.Tensor:
        """The numbers (cells, heads, longest) of rows of (entries, heads, n_tokens)."""
        lanes = self.entries[:, None] * heads + torch.arange(heads, device=self.entries.device)
        return lanes[:, :, None] * n_tokens + self.tokens[:, None]

    def targets(self, heads: int, n_tokens: int, aside: int) -> torch.Tensor:
        """As ``rows``; of copies the row ``aside``."""
        rows = self.rows(heads, n_tokens)
        return rows.masked_fill_(self.is_copy[:, None], aside) if self._is_filled else rows


class _RowReader:
    """Reads rows of a tensor (b, h, n, width)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._flat: torch.Tensor | None = None

    def at(self, places: _CellPlaces) -> torch.Tensor:
        """The rows of cells, (cells, h, longest, width)."""
        if places.run is not None:
            return self._tensor[places.run]
        if places.is_all:
            return self._tensor.index_select(0, places.entries)
        _, heads, n_tokens, width = self._tensor.shape
        if self._flat is None:
            self._flat = self._tensor.reshape(-1, width)
        rows = places.rows(heads, n_tokens)
        return self._flat.index_select(0, rows.view(-1)).view(*rows.shape, width)


class _CellResults:
    """Results (b, h, n, width) that are written by cells; the others are ``fill``."""

    def __init__(self, like: torch.Tensor, width: int, fill: float = 0.0) -> None:
        self._like, self._width, self._fill = like, width, fill
        self._flat: torch.Tensor | None = None

    def _made(self, dtype: torch.dtype) -> torch.Tensor:
        """All rows, and one that is left out."""
        if self._flat is None:
            n_rows = self._like.shape[:3].numel() + 1
            shape = n_rows, self._width
            self._flat = torch.full(shape, self._fill, dtype=dtype, device=self._like.device)
        return self._flat

    def write(self, places: _CellPlaces, part: torch.Tensor) -> None:
        """Write the rows of cells, (cells, h, longest, width)."""
        flat = self._made(part.dtype)
        if places.run is not None:
            self.tensor(part.dtype)[places.run] = part
            return
        if places.is_all:
            self.tensor(part.dtype).index_copy_(0, places.entries, part)
            return
        _, heads, n_tokens = self._like.shape[:3]
        rows = places.targets(heads, n_tokens, len(flat) - 1)
        flat.index_copy_(0, rows.view(-1), part.reshape(-1, self._width))

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The results; of ``dtype`` if there was no cell."""
        return self._made(dtype)[:-1].view(*self._like.shape[:3], self._width)


def _call_of(
    cells: Bucket, call: Call, three: Three, places: tuple[_CellPlaces, _CellPlaces]
) -> Call:
    """A kernel call of gathered rows, with the call's own mask and that of the cells."""
    query, key, value = three
    queries, keys = places
    bias = None if call.bias is None else _bias_at(four_dims(call.bias), queries, keys)
    masked = _masked(cells, queries, keys)
    if masked is not None and bias is None:
        bias = torch.zeros(masked.shape, dtype=query.dtype, device=query.device)
        bias.masked_fill_(masked, -torch.inf)
    elif masked is not None and bias is not None:
        bias = bias.masked_fill(masked, -torch.inf)
    return Call(query, key, value, cells.causal, call.scale, bias, call.stored)


def _masked(cells: Bucket, queries: _CellPlaces, keys: _CellPlaces) -> torch.Tensor | None:
    """Which pairs of cells are masked, (cells, 1, queries or 1, keys); None: none."""
    copies = keys.is_copy[:, None]
    if cells.rule is not None:
        entries = torch.from_numpy(cells.entries).to(copies.device)
        copies = copies | ~cells.rule.keeps(entries, queries.tokens, keys.tokens)
    elif not cells.keys.is_filled or cells.causal:
        return None
    return copies.unsqueeze(1)


def _bias_at(bias: torch.Tensor, queries: _CellPlaces, keys: _CellPlaces) -> torch.Tensor:
    """The part of a mask (b or 1, h or 1, n or 1, m or 1) for the pairs of cells, (cells, h or 1,
    n or 1, m or 1)."""
    entries, rows, columns = queries.entries, queries.tokens, keys.tokens
    if bias.shape[0] == 1:
        entries = torch.zeros_like(entries)
    rows = rows if bias.shape[2] > 1 else torch.zeros_like(rows[:, :1])
    columns = columns if bias.shape[3] > 1 else torch.zeros_like(columns[:, :1])
    heads = torch.arange(bias.shape[1], device=bias.device)
    entry, head = entries[:, None, None, None], heads[:, None, None]
    return bias[entry, head, rows[:, None, :, None], columns[:, None, None, :]]


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
