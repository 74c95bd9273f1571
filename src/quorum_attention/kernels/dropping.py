"""Attention with dropout in torch's operators, tile by tile: any dtype, any device, little memory.

For kernels whose operator has no dropout, or drops other pairs in every call. The recurrences are
FlashAttention-2's, in fp32 (fp64 for fp64 inputs): a block of queries walks its tiles of keys, in
the forward with a running maximum and sum, in the backward with the log-sum-exp of the whole rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from quorum_attention.decomposition import Decomposition, Rectangle
from quorum_attention.kernels.dropout import Dropout, dropped, dropped_bytes
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, empty_, merge_
from quorum_attention.kernels.positions import positions
from quorum_attention.kernels.protocol import (
    CallShape,
    Extent,
    Gradients,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.workspace import SLACK_BYTES

# Of a tile, all its heads together: most pairs, and most query rows or key rows. A rectangle's keys
# are cut at the last.
_PAIRS = 1 << 17
_ROWS = 1024
_KEYS = 512


@dataclass(frozen=True, slots=True)
class _Tile:
    """Most batch entries, key heads, queries and keys of one tile."""

    batch: int
    key_heads: int
    queries: int
    keys: int

    @classmethod
    def of(cls, batch: int, key_heads: int, shared: int, n_queries: int, n_keys: int) -> _Tile:
        """The tiles of a task; ``shared`` query heads of each key head are in one tile."""
        keys = max(1, min(n_keys, _KEYS))
        queries = max(1, min(n_queries, _PAIRS // (shared * keys), _ROWS // shared))
        rows = shared * queries
        lanes = max(1, min(_PAIRS // (rows * keys), _ROWS // rows, _ROWS // keys))
        heads = max(1, min(key_heads, lanes))
        entries = max(1, min(batch, lanes // heads)) if heads == key_heads else 1
        return cls(entries, heads, queries, keys)


@dataclass(slots=True)
class _Block:
    """A block of queries: some key heads of some batch entries, with all their query heads.

    Attributes:
        task, rectangle: what it is a part of.
        entries, key_heads, heads: which batch entries, key heads and query heads.
        rows: queries, local positions.
        query: (b, hk, g * rows, d) in the dtype that is computed in.
        at: (rows,) global positions.
        dropout: of these heads and entries.
    """

    task: TaskTensors
    rectangle: Rectangle
    entries: slice
    key_heads: slice
    heads: slice
    rows: slice
    query: torch.Tensor
    at: torch.Tensor
    dropout: Dropout

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block's part of (b, hq, nq, ...), a view."""
        return tensor[self.entries, self.heads, self.rows]

    def grouped(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block's part of (b, hq, nq, d) as (b, hk, g * rows, d), in the dtype of ``query``."""
        part = self.of_rows(tensor).to(self.query.dtype)
        return part.reshape(*self.query.shape[:3], tensor.shape[-1])

    def of_keys(self, tensor: torch.Tensor, keys: slice) -> torch.Tensor:
        """The block's part of (b, hk, nk, d), in the dtype of ``query``."""
        return tensor[self.entries, self.key_heads, keys].to(self.query.dtype)

    def keys(self, most: int) -> Iterator[slice]:
        """Its keys, by tiles: those that none of its queries sees are left out."""
        r = self.rectangle
        stop = min(r.key_stop, self.rows.stop) if r.causal else r.key_stop
        for start in range(r.key_start, stop, most):
            yield slice(start, min(start + most, stop))

    def scores(self, key: torch.Tensor, keys: slice) -> torch.Tensor:
        """Scores (b, hk, g * rows, keys), -inf where a pair is not kept."""
        found = (self.query @ key.mT).mul_(self.task.scale)
        wide = self._wide(found)
        bias = self.task.bias(Rectangle(self.rows.start, self.rows.stop, keys.start, keys.stop))
        if bias is not None:
            bias = bias[(None,) * (4 - bias.dim())]
            bias = bias[self.entries] if bias.shape[0] > 1 else bias
            if bias.shape[1] > 1:
                wide.add_(bias[:, self.heads].unflatten(1, wide.shape[1:3]))
            else:
                wide.add_(bias.unsqueeze(1))
        if self.rectangle.causal and keys.stop - 1 > self.rows.start:
            # The rectangle is a square on the diagonal of local positions.
            rows = torch.arange(self.rows.start, self.rows.stop, device=found.device)
            columns = torch.arange(keys.start, keys.stop, device=found.device)
            wide.masked_fill_(columns > rows.unsqueeze(-1), -torch.inf)
        return found

    def dropped(self, like: torch.Tensor, keys: slice) -> torch.Tensor:
        """Which pairs of a tile are dropped, in the shape of ``like`` (b, hk, g * rows, keys)."""
        wide = self._wide(like)
        batch, heads = wide.shape[0], wide.shape[1] * wide.shape[2]
        runs = self.task.task.segments(keys.start, keys.stop)
        return dropped(self.dropout, batch, heads, self.at, runs).view(like.shape)

    def _wide(self, pairs: torch.Tensor) -> torch.Tensor:
        """(b, hk, g * rows, keys) as (b, hk, g, rows, keys)."""
        found: torch.Tensor = pairs.unflatten(2, (-1, self.rows.stop - self.rows.start))
        return found


def forward(task: TaskTensors, state: Statistics) -> None:
    """Merge the task's kept pairs into ``state``, in place."""
    for block, most in _blocks(task, state.out.dtype):
        out, lse = _forward_block(task, block, most)
        at = block.of_rows(state.out)
        with task.timed("merge"):
            merge_(at, block.of_rows(state.lse), out.view(at.shape), lse.view(at.shape[:3]))
        del out, lse  # freed before the next block is computed


def _forward_block(
    task: TaskTensors, block: _Block, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (b, hk, g * rows, dv) and lse (b, hk, g * rows, 1) of a block."""
    shape = (*block.query.shape[:3], 1)
    largest = block.query.new_full(shape, -torch.inf)
    total = block.query.new_zeros(shape)
    out = block.query.new_zeros((*shape[:3], task.value.shape[-1]))
    for keys in block.keys(most):
        p = block.scores(block.of_keys(task.key, keys), keys)
        now = torch.maximum(largest, p.amax(dim=-1, keepdim=True))
        # The maximum of a row without keys so far is -inf, and its differences would be NaN.
        base = now.masked_fill(now == -torch.inf, 0.0)
        p.sub_(base).exp_()
        before = largest.sub_(base).exp_()
        total.mul_(before).add_(p.sum(dim=-1, keepdim=True))
        p.masked_fill_(block.dropped(p, keys), 0.0)
        out.mul_(before).add_(p @ block.of_keys(task.value, keys))
        largest = now
        del p
    lse = total.log().add_(largest)
    out.div_(total.masked_fill_(total == 0.0, 1.0)).mul_(block.dropout.rescale)
    return out, lse


def backward(task: TaskTensors, grads: Gradients) -> None:
    """Add the task's gradients into ``grads``, in place. (They are never scaled.)"""
    for block, most in _blocks(task, grads.grad_query.dtype):
        _backward_block(task, block, most, grads)


def _backward_block(task: TaskTensors, block: _Block, most: int, grads: Gradients) -> None:
    rescale = block.dropout.rescale
    grad_out = block.grouped(grads.grad_out)
    delta = (grad_out * block.grouped(grads.out)).sum(dim=-1, keepdim=True)
    lse = block.of_rows(grads.lse).reshape(*block.query.shape[:3], 1)
    # In a row without keys exp(-inf - 0) is 0, where -inf - -inf would be NaN.
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    grad_query = torch.zeros_like(block.query)
    for keys in block.keys(most):
        key = block.of_keys(task.key, keys)
        p = block.scores(key, keys).sub_(lse).exp_()
        drops = block.dropped(p, keys)
        at = (block.entries, block.key_heads, keys)
        grads.grad_value[at].add_(p.masked_fill(drops, 0.0).mT @ grad_out, alpha=rescale)
        ds = grad_out @ block.of_keys(task.value, keys).mT
        ds.mul_(rescale).masked_fill_(drops, 0.0).sub_(delta).mul_(p)
        grad_query.add_(ds @ key)
        grads.grad_key[at].add_(ds.mT @ block.query, alpha=task.scale)
        del p, drops, ds
    target = block.of_rows(grads.grad_query)
    target.add_(grad_query.view(target.shape), alpha=task.scale)


def _blocks(task: TaskTensors, dtype: torch.dtype) -> Iterator[tuple[_Block, int]]:
    """The blocks of a task, and most keys of a tile."""
    batch, query_heads = task.query.shape[:2]
    key_heads = task.key.shape[1]
    assert task.dropout is not None, "there is nothing to drop"
    if 0 in (batch, query_heads, key_heads):
        return
    shared = query_heads // key_heads
    for r in task.rectangles:
        if r.n_queries == 0 or r.n_keys == 0:
            continue
        tile = _Tile.of(batch, key_heads, shared, r.n_queries, r.n_keys)
        for entry in range(0, batch, tile.batch):
            entries = slice(entry, min(entry + tile.batch, batch))
            for head in range(0, key_heads, tile.key_heads):
                own = slice(head, min(head + tile.key_heads, key_heads))
                heads = slice(own.start * shared, own.stop * shared)
                for start in range(r.query_start, r.query_stop, tile.queries):
                    rows = slice(start, min(start + tile.queries, r.query_stop))
                    query = task.query[entries, heads, rows].to(dtype)
                    shape = (query.shape[0], own.stop - own.start, -1, query.shape[-1])
                    block = _Block(
                        task, r, entries, own, heads, rows, query.reshape(shape),
                        positions(task.task, rows.start, rows.stop, query.device),
                        task.dropout.at(heads.start, entry),
                    )  # fmt: skip
                    yield block, tile.keys


def whole_task(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float,
    bias: torch.Tensor | None,
    dropout: Dropout,
) -> TaskTensors:
    """A whole call (``WholeCalls``) as one task."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    return TaskTensors(
        task=Decomposition(max(n_queries, n_keys)).task(()),
        rectangles=(Rectangle(0, n_queries, 0, n_keys, causal),),
        query=query,
        key=key,
        value=value,
        scale=scale,
        is_causal=causal,
        bias=partial(_part_of, bias),
        dropout=dropout,
    )


def whole_forward(
    task: TaskTensors, out_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of a whole call (``WholeCalls``); ``out`` is rounded once."""
    query = task.query
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.empty((*query.shape[:3], task.value.shape[-1]), dtype=work, device=query.device)
    state = Statistics(out, torch.empty(query.shape[:3], dtype=work, device=query.device))
    empty_(state.out, state.lse)
    forward(task, state)
    return state.out.to(out_dtype or query.dtype), state.lse


def whole_backward(
    task: TaskTensors,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value of a whole call (``WholeCalls``), rounded once."""
    work = torch.float64 if task.query.dtype == torch.float64 else torch.float32
    three = (task.query, task.key, task.value)
    query, key, value = (torch.zeros(t.shape, dtype=work, device=t.device) for t in three)
    backward(task, Gradients(grad_out, out, lse, query, key, value))
    dtype = grad_dtype or task.query.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _part_of(bias: torch.Tensor | None, r: Rectangle) -> torch.Tensor | None:
    """The mask of a rectangle, from that of a whole call."""
    if bias is None:
        return None
    bias = bias[(None,) * (4 - bias.dim())]
    rows = slice(r.query_start, r.query_stop) if bias.shape[2] > 1 else slice(None)
    columns = slice(r.key_start, r.key_stop) if bias.shape[3] > 1 else slice(None)
    return bias[:, :, rows, columns]


def forward_bytes(call: CallShape, extent: Extent) -> int:
    """Upper bound of the bytes that ``forward`` takes."""
    sizes = _sizes(call, extent)
    rows = sizes.rows * (call.head_dim + 4 * call.value_dim + 8)
    keys = sizes.keys * max(call.head_dim, call.value_dim)
    inside = (sizes.pairs + rows + keys) * sizes.item + sizes.drops + sizes.bias
    results = 0
    if extent.direct:
        # In the dtype computed in, and in another that may be asked for.
        every = extent.batch * extent.query_heads * extent.max_queries
        results = every * ((call.value_dim + 1) * sizes.item + call.value_dim * 8)
    return max(inside, rows * sizes.item + MERGE_WORKSPACE_BYTES) + results + SLACK_BYTES


def backward_bytes(call: CallShape, extent: Extent) -> int:
    """Upper bound of the bytes that ``backward`` takes."""
    sizes = _sizes(call, extent)
    rows = sizes.rows * (4 * call.head_dim + 4 * call.value_dim + 8)
    keys = sizes.keys * 2 * (call.head_dim + call.value_dim)
    inside = (3 * sizes.pairs + rows + keys) * sizes.item + sizes.drops + sizes.bias
    results = 0
    if extent.direct:
        queries = extent.batch * extent.query_heads * extent.max_queries
        others = extent.batch * extent.key_heads * extent.max_keys
        numbers = queries * call.head_dim + others * (call.head_dim + call.value_dim)
        results = numbers * (sizes.item + 8)
    return inside + results + SLACK_BYTES


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Pairs, query rows and key rows of the largest tile; bytes of an element, of what says which
    pairs are dropped, and of a mask."""

    pairs: int
    rows: int
    keys: int
    item: int
    drops: int
    bias: int


def _sizes(call: CallShape, extent: Extent) -> _Sizes:
    shared = extent.query_heads // max(1, extent.key_heads)
    lanes, longest = extent.batch * extent.query_heads, min(_KEYS, extent.max_keys)
    # Of rectangles of any size up to the largest: see ``_Tile``.
    rows = max(1, min(lanes * extent.max_queries, max(_ROWS, shared)))
    keys = min(extent.batch * extent.key_heads * extent.max_keys, _ROWS)
    pairs = min(lanes * extent.max_queries * extent.max_keys, max(_PAIRS, shared * longest))
    bias = 0
    if call.mask is not None:
        # Made for all heads of the task at a time; what is added is of the dtype computed in.
        every = extent.batch if call.mask.batch else 1
        every *= extent.query_heads if call.mask.heads else 1
        one = min(extent.max_queries * extent.max_keys, max(_PAIRS // max(1, shared), longest))
        bias = every * one * call.dtype.itemsize + 8 * pairs
    drops = dropped_bytes(1, 1, rows, -(-pairs // rows))
    return _Sizes(pairs, rows, keys, 8 if call.dtype == torch.float64 else 4, drops, bias)
