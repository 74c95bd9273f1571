"""Runs the calls of a ``Packing``: gathers rows, calls a kernel, writes the results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from quorum_attention.decomposition import PARTIAL, Pairs, Ranges, Verdict
from quorum_attention.kernels.masked.packing import Bucket, CellSide, Packing
from quorum_attention.kernels.operator_inputs import four_dims
from quorum_attention.kernels.protocol import (
    BiasShape,
    Call,
    CallShape,
    Extent,
    Gradients,
    Kernel,
    Saved,
    Statistics,
    TaskTensors,
    Three,
    state_dtype,
)
from quorum_attention.kernels.reference import QueryBlock, ScoreTransform
from quorum_attention.kernels.torch_private import outside

# The blocks of more entries are not looked at together.
_FEW_ENTRIES = 64


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
        with outside():
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


class PackedKernel(Kernel):
    """Attention under a mask with a ``Packing``.

    Args:
        packing: of the mask, for calls of ``sizes``.
        base: computes packed calls.
        by_blocks: makes the kernel that computes all other calls: tasks, and calls with dropout.
        scores: what is done to scores beside the mask.
    """

    own_attention = True
    sparse = True

    def __init__(
        self,
        packing: Packing,
        shape: CallShape,
        base: Kernel,
        by_blocks: Callable[[], Kernel],
        scores: ScoreTransform,
    ) -> None:
        self.name, self.packing, self.base = base.name, packing, base
        self._sizes, self._by_blocks, self._scores = shape, by_blocks, scores
        self._share = packing.pairs / (shape.batch * shape.n_queries * shape.n_keys)
        self.whole_tasks = base.whole_tasks
        self.several_streams = not base.whole_tasks
        self.rates = base.rates
        self.launch_seconds = base.launch_seconds
        self.scaled_backward, self.fp32_products = base.scaled_backward, base.fp32_products
        self.dropout, self.accepts_inf_lse = base.dropout, base.accepts_inf_lse
        self.wide_masks = base.wide_masks

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        return self.base.refusal(replace(shape, is_causal=True))

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """See ``Kernel``."""
        return Pairs(n_queries, n_keys, is_causal, self._verdict, min(1.0, self._share))

    def _verdict(self, block: Ranges) -> Verdict:
        if self._sizes.batch > _FEW_ENTRIES:
            return PARTIAL
        verdict = self._by_blocks().kept_pairs(*self._sizes.lengths).verdict
        assert verdict is not None
        return verdict(block)

    def scores_of_pairs(self) -> ScoreTransform:
        """See ``Kernel``."""
        return replace(self._scores, kept=self._kept)

    def _kept(self, block: QueryBlock, keys: slice) -> torch.Tensor:
        pairs = block.indices(keys)
        return self.packing.kept(pairs.entries % self._sizes.batch, pairs.queries, pairs.keys)

    def takes_whole(self, shape: CallShape, tokens: int, every: bool) -> bool:
        """Calls are told which entries they have."""
        return every or not shape.dropout

    def _is_packed(self, call: Call) -> bool:
        # torch.vmap may add entries, which are those of the batch over and over.
        last = call.first_entry + call.query.shape[0]
        return call.dropout is None and last <= self._sizes.batch

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``."""
        if not self._is_packed(call):
            return self._by_blocks().whole_forward(call)
        return packed_forward(self.packing, self.base, call)

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``."""
        if not self._is_packed(call):
            return self._by_blocks().whole_backward(call, saved)
        return packed_backward(self.packing, self.base, call, saved)

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        self._by_blocks().forward(task, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        self._by_blocks().backward(task, grads)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        if not extent.direct or shape.dropout:
            return self._by_blocks().forward_workspace_bytes(shape, extent)
        return self.packing.workspace_bytes(self.base, shape, extent, backward=False)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        if not extent.direct or shape.dropout:
            return self._by_blocks().backward_workspace_bytes(shape, extent)
        return self.packing.workspace_bytes(self.base, shape, extent, backward=True)
