"""The reference: attention in torch's operators, tile by tile, for any dtype and device.

It runs what no fused kernel here can: the kernels ``dense`` and ``tiles``, score modifications
without a compiler, dropout where an operator has none, or drops other pairs in every call, and rows
of a CPU's call that are not finite. With scores
S = scale Q K^T, changed and masked, and Z of kernels/dropout.py,

    lse = logsumexp(S),   P = exp(S - lse),   O = (Z P) V,
    dV = (Z P)^T dO,   dS = P * (Z * (dO V^T) - rowsum(dO * O)),   dQ = scale dS K,
    dK = scale dS^T Q.

The recurrences are FlashAttention-2's, in fp32 (fp64 for fp64 inputs): a block of queries walks its
tiles of keys, in the forward with a running maximum and sum, in the backward with the log-sum-exp
of the whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.dropout import dropped, dropped_bytes
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, merge_
from quorum_attention.kernels.operator_sizes import SLACK_BYTES
from quorum_attention.kernels.protocol import (
    CallShape,
    Extent,
    Gradients,
    Indices,
    Kernel,
    Saved,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.tensors import positions


@dataclass(frozen=True, slots=True)
class TileLimits:
    """The most pairs, query rows or key rows, and keys of a tile, all its heads together. A single
    row of the query heads of a key head may have more pairs."""

    pairs: int
    rows: int
    keys: int


# On a CPU tiles stay in the cache. Elsewhere, and for whole rows, fewer launches count more.
IN_CACHE = TileLimits(1 << 17, 1024, 512)
LARGE = TileLimits(1 << 21, 8192, 4096)

ScoreFunction = Callable[
    [torch.Tensor, "QueryBlock", slice, bool], tuple[torch.Tensor, torch.Tensor | None]
]
"""Changes scaled scores (b, h, rows, keys) of a block's tile, before they are masked; it may write
to them. Also returns the derivative if the last argument is True; None is a derivative of 1."""

At = tuple[slice, slice, slice]
"""Batch entries, key heads and queries."""

Kept = Callable[["QueryBlock", slice], torch.Tensor | None]
"""Which pairs of a block's tile are kept: bool, broadcastable to (b, h, rows, keys); None: all."""


@dataclass(frozen=True, slots=True)
class ScoreTransform:
    """What is done to scores beside what a task says.

    Attributes:
        function, kept: see their types; None: nothing.
        whole_rows: a tile has all keys of its rows. In the backward probabilities of rows that have
            no other keys are then made to add up to 1, which an lse of 1,000 in fp32 does not.
        tiles: how large tiles are; None: as is good for the device.
        matrices: the most (b, h, rows, keys) tensors in the dtype computed in that ``function`` and
            ``kept`` have at a time, their results among them.
        exact_delta: the delta of whole rows is computed from their probabilities, not from an
            output rounded to 16 bits; where that has no columns of its own (call/lse_columns.py).
    """

    function: ScoreFunction | None = None
    kept: Kept | None = None
    whole_rows: bool = False
    tiles: TileLimits | None = None
    matrices: int = 0
    exact_delta: bool = False

    def limits(self, device_type: str) -> TileLimits:
        """Of tiles on such a device."""
        return self.tiles or (IN_CACHE if device_type == "cpu" else LARGE)

    def most_keys(self, n_keys: int, limits: TileLimits) -> int:
        """Of a tile, where there are ``n_keys``."""
        return max(1, n_keys if self.whole_rows else min(n_keys, limits.keys))


PLAIN = ScoreTransform()
WHOLE_ROWS = ScoreTransform(whole_rows=True, tiles=LARGE)


class QueryBlock:
    """A block of queries: some key heads of some batch entries, with all their query heads.

    Args:
        task, rectangle, transform: what it is a part of, and what is done to its scores.
        at: batch entries, key heads and queries (local positions).
        like: on the device and in the dtype that is computed in.

    Attributes:
        heads: its query heads.
        most_keys: of a tile.
        query: (b, hk, g * rows, d), like ``like``.
    """

    def __init__(
        self,
        task: TaskTensors,
        rectangle: Rectangle,
        transform: ScoreTransform,
        at: At,
        like: torch.Tensor,
    ) -> None:
        self.task, self.rectangle, self.transform = task, rectangle, transform
        self.entries, self.key_heads, self.rows = at
        shared = task.query.shape[1] // task.key.shape[1]
        self.heads = slice(self.key_heads.start * shared, self.key_heads.stop * shared)
        self.most_keys = transform.most_keys(rectangle.n_keys, transform.limits(like.device.type))
        query = self.of_rows(task.query).to(like.device).to(like.dtype)
        groups = self.key_heads.stop - self.key_heads.start
        self.query = query.reshape(query.shape[0], groups, -1, query.shape[-1])

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block's part of (b, hq, nq, ...), a view."""
        return tensor[self.entries, self.heads, self.rows]

    def grouped(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block's part of (b, hq, nq, d) as (b, hk, g * rows, d), as ``query``."""
        return self._here(self.of_rows(tensor)).reshape(*self.query.shape[:3], tensor.shape[-1])

    def of_keys(self, tensor: torch.Tensor, keys: slice) -> torch.Tensor:
        """The block's part of (b, hk, nk, d), as ``query``."""
        return self._here(tensor[self.entries, self.key_heads, keys])

    def _here(self, part: torch.Tensor) -> torch.Tensor:
        return part.to(self.query.device).to(self.query.dtype)

    def indices(self, keys: slice) -> Indices:
        """The pairs of its queries and some keys, by their numbers in the whole call; on the device
        that computes, though the task's tensors may be elsewhere."""
        r = Rectangle(self.rows.start, self.rows.stop, keys.start, keys.stop)
        return self.task.indices(r, self.entries, self.heads, self.query.device)

    def tiles(self) -> Iterator[slice]:
        """Its keys, by tiles: those that none of its queries sees are left out."""
        r = self.rectangle
        stop = min(r.key_stop, self.rows.stop) if r.causal else r.key_stop
        for start in range(r.key_start, stop, self.most_keys):
            yield slice(start, min(start + self.most_keys, stop))

    def scores(
        self, key: torch.Tensor, keys: slice, *, derivative: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores (b, hk, g * rows, keys), -inf where a pair is not kept; the derivative of their
        change if it is asked for, None where it is 1."""
        scores = (self.query @ key.mT).mul_(self.task.scale)
        pairs, slope = self.by_head(scores), None
        if self.transform.function is not None:
            pairs, slope = self.transform.function(pairs, self, keys, derivative)
        self._mask_(pairs, keys)
        return pairs.view(scores.shape), None if slope is None else slope.reshape(scores.shape)

    def _mask_(self, pairs: torch.Tensor, keys: slice) -> None:
        """Add the mask to a tile (b, h, rows, keys), and -inf where pairs are not kept, in
        place."""
        bias = self.task.bias(Rectangle(self.rows.start, self.rows.stop, keys.start, keys.stop))
        if bias is not None:
            bias = bias[(None,) * (4 - bias.dim())]
            bias = bias[self.entries] if bias.shape[0] > 1 else bias
            pairs.add_(bias[:, self.heads] if bias.shape[1] > 1 else bias)
        if self.rectangle.causal and keys.stop - 1 > self.rows.start:
            # The rectangle is a square on the diagonal of local positions.
            rows = torch.arange(self.rows.start, self.rows.stop, device=pairs.device)
            columns = torch.arange(keys.start, keys.stop, device=pairs.device)
            pairs.masked_fill_(columns > rows.unsqueeze(-1), -torch.inf)
        kept = None if self.transform.kept is None else self.transform.kept(self, keys)
        if kept is not None:
            pairs.masked_fill_(~kept, -torch.inf)

    def dropped(self, like: torch.Tensor, keys: slice) -> torch.Tensor | None:
        """Which pairs of a tile are dropped, in the shape of ``like`` (b, hk, g * rows, keys)."""
        task = self.task
        if task.dropout is None:
            return None
        batch, heads = self.by_head(like).shape[:2]
        some = task.dropout.at(self.heads.start, self.entries.start)
        at = positions(task.task, self.rows.start, self.rows.stop, like.device)
        runs = task.task.segments(keys.start, keys.stop)
        return dropped(some, batch, heads, at, runs).view(like.shape)

    def by_head(self, pairs: torch.Tensor) -> torch.Tensor:
        """(b, hk, g * rows, keys) as (b, h, rows, keys), a view."""
        heads, rows = self.heads.stop - self.heads.start, self.rows.stop - self.rows.start
        return pairs.view(pairs.shape[0], heads, rows, pairs.shape[-1])


def _forward_block(block: QueryBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (b, hk, g * rows, dv) and lse (b, hk, g * rows, 1) of a block."""
    task, shape = block.task, (*block.query.shape[:3], 1)
    largest = block.query.new_full(shape, -torch.inf)
    total = block.query.new_zeros(shape)
    out = block.query.new_zeros((*shape[:3], task.value.shape[-1]))
    for keys in block.tiles():
        p, _ = block.scores(block.of_keys(task.key, keys), keys, derivative=False)
        now = torch.maximum(largest, p.amax(dim=-1, keepdim=True))
        # The maximum of a row without keys so far is -inf, and its differences would be NaN.
        base = now.masked_fill(now == -torch.inf, 0.0)
        p.sub_(base).exp_()
        before = largest.sub_(base).exp_()
        total.mul_(before).add_(p.sum(dim=-1, keepdim=True))
        drops = block.dropped(p, keys)
        if drops is not None:
            p.masked_fill_(drops, 0.0)
        out.mul_(before).add_(p @ block.of_keys(task.value, keys))
        largest = now
        del p, drops
    # Divided by the sum instead of taking exp(S - lse): a large lse has too few digits left.
    lse = torch.where(largest == torch.inf, largest, total.log().add_(largest))
    out.div_(total.masked_fill_(total == 0.0, 1.0)).masked_fill_(lse == -torch.inf, 0.0)
    if task.dropout is not None:
        out.mul_(task.dropout.rescale)
    return out, lse


def _backward_block(block: QueryBlock, grads: Gradients) -> None:
    task, rows = block.task, BackwardRows(block, grads)
    rescale = 1.0 if task.dropout is None else task.dropout.rescale
    grad_query = torch.zeros_like(block.query)
    for keys in block.tiles():
        key = block.of_keys(task.key, keys)
        p, ds, derivative, drops = rows.pairs(key, keys, derivative=True)
        if drops is not None:
            p.masked_fill_(drops, 0.0)
        at = (block.entries, block.key_heads, keys)
        grads.grad_value[at].add_(p.mT @ rows.grad_out, alpha=rescale)
        del p, drops
        if derivative is not None:
            ds.mul_(derivative)
        grad_query.add_(ds @ key)
        grads.grad_key[at].add_(ds.mT @ block.query, alpha=task.scale)
        del derivative, ds
    target = block.of_rows(grads.grad_query)
    target.add_(grad_query.view(target.shape), alpha=task.scale)


# By how much the logarithm of a row's sum may be off if it has no other keys, by bytes of a number:
# as a share of its lse, and besides. In fp32 and float64 delta of other rows is as exact.
_ROUNDING = {2: (2.0**-20, 2.0**-12), 4: (2.0**-22, 2.0**-20), 8: (2.0**-47, 2.0**-44)}


class BackwardRows:
    """What a backward reads of a block's rows, (b, hk, g * rows, 1 or dv).

    Attributes:
        grad_out, delta, lse: of the rows.
    """

    def __init__(self, block: QueryBlock, saved: Gradients | Saved) -> None:
        self.block, self.grad_out = block, block.grouped(saved.grad_out)
        products = self.grad_out * block.grouped(saved.out)
        self.delta = products.sum(dim=-1, keepdim=True)
        lse = block.grouped(saved.lse.unsqueeze(-1))
        # In a row without keys exp(-inf - 0) is 0, where -inf - -inf would be NaN.
        self.lse = lse.masked_fill(lse == -torch.inf, 0.0)

    def pairs(
        self, key: torch.Tensor, keys: slice, *, derivative: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Of a tile: probabilities; the gradient of scores after their change; the derivative of
        that if it is asked for (``QueryBlock.scores``); and which pairs are dropped."""
        block, dropout = self.block, self.block.task.dropout
        p, slope = block.scores(key, keys, derivative=derivative)
        p.sub_(self.lse).exp_()
        drops = block.dropped(p, keys)
        ds = self.grad_out @ block.of_keys(block.task.value, keys).mT
        if dropout is not None and drops is not None:
            ds.mul_(dropout.rescale).masked_fill_(drops, 0.0)
        ds.sub_(self.delta_of(p, ds) if block.transform.whole_rows else self.delta).mul_(p)
        return p, ds, slope, drops

    def delta_of(self, p: torch.Tensor, dp: torch.Tensor) -> torch.Tensor:
        """Delta, of rows that have no keys but those of ``p`` by ``exact_delta``. Their
        probabilities are made to add up to 1, in place; other rows are left alone.

        Rows are told apart by the logarithm of their sum, which rounding moves as much as it moves
        lse: beside an lse of a million, the sum itself may be anything from 0 on.
        """
        total = p.sum(dim=-1, keepdim=True)
        share, besides = _ROUNDING[self.block.task.query.dtype.itemsize]
        rounding = (self.lse.abs() * share).add_(besides).clamp_(max=0.01)
        others = total.log().abs_() > rounding
        p.div_(total.masked_fill_(others, 1.0))
        if not self.block.transform.exact_delta:
            return self.delta
        return torch.where(others, self.delta, (p * dp).sum(dim=-1, keepdim=True))


def _blocks(
    task: TaskTensors, like: torch.Tensor, transform: ScoreTransform
) -> Iterator[QueryBlock]:
    """The blocks of a task; all query heads of a key head are in one tile."""
    batch, key_heads = task.key.shape[:2]
    if not task.rectangles:
        return
    shared, limits = task.query.shape[1] // key_heads, transform.limits(task.query.device.type)
    for r in task.rectangles:
        keys = transform.most_keys(r.n_keys, limits)
        queries = max(1, min(limits.pairs // (shared * keys), limits.rows // shared))
        rows = shared * min(r.n_queries, queries)
        lanes = min(limits.pairs // (rows * keys), limits.rows // rows, limits.rows // keys)
        heads = max(1, min(key_heads, lanes))
        entries = max(1, lanes // heads) if heads == key_heads else 1
        for at in product(
            runs(slice(0, batch), entries),
            runs(slice(0, key_heads), heads),
            runs(slice(r.query_start, r.query_stop), queries),
        ):
            yield QueryBlock(task, r, transform, at, like)


def runs(whole: slice, most: int) -> Iterator[slice]:
    """``whole`` in runs of at most ``most``."""
    for start in range(whole.start, whole.stop, most):
        yield slice(start, min(start + most, whole.stop))


def _tile_bytes(
    shape: CallShape, extent: Extent, transform: ScoreTransform, numbers: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Bytes of the largest tile; of its rows; and of a number.

    Args:
        numbers: how many there are of each query row, each key row and each pair.
    """
    limits, item = transform.limits(shape.device_type), shape.state_dtype.itemsize
    shared = extent.query_heads // max(1, extent.key_heads)
    lanes, longest = extent.batch * extent.query_heads, transform.most_keys(extent.max_keys, limits)
    # Of rectangles of any size up to the largest: see ``_blocks``.
    rows = max(1, min(lanes * extent.max_queries, max(limits.rows, shared)))
    keys = min(extent.batch * extent.key_heads * extent.max_keys, max(limits.rows, longest))
    most_pairs = max(limits.pairs, shared * longest)
    pairs = min(lanes * extent.max_queries * extent.max_keys, most_pairs)
    of_rows = rows * numbers[0] * item
    inside = of_rows + (keys * numbers[1] + pairs * (numbers[2] + transform.matrices)) * item
    if shape.bias is not None:
        # Made for all heads of the task at a time; what is added is of the dtype computed in.
        every = extent.batch if shape.bias.batch else 1
        every *= extent.query_heads if shape.bias.heads else 1
        most = max(limits.pairs // max(1, shared), longest)
        inside += (
            every * min(extent.max_queries * extent.max_keys, most) * shape.bias_dtype.itemsize
        )
        inside += 8 * pairs
    if shape.dropout:
        inside += dropped_bytes(1, 1, rows, ceil_div(pairs, rows))
    return inside, of_rows, item


class TiledKernel(Kernel):
    """The tiled loop as a kernel, with a change of scores: any device, any floating dtype.

    Args:
        scores: the change.
    """

    name = "tiles"
    grouped = True
    rates = (0.3, 0.3)
    fp32_products = True
    dropout = True
    wide_masks = True

    def __init__(self, scores: ScoreTransform = PLAIN) -> None:
        self.scores = scores

    def refusal(self, shape: CallShape) -> str | None:
        """None: it runs every call."""
        return None

    def _form(self, task: TaskTensors) -> tuple[TaskTensors, ScoreTransform]:
        """The pairs to compute, and what is done to scores."""
        return task, self.scores

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        task, transform = self._form(task)
        for block in _blocks(task, state.out, transform):
            out, lse = _forward_block(block)
            at = block.of_rows(state.out)
            with task.timed("merge"):
                merge_(at, block.of_rows(state.lse), out.view(at.shape), lse.view(at.shape[:3]))
            del out, lse  # freed before the next block is computed

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place. (They are never scaled.)"""
        task, transform = self._form(task)
        for block in _blocks(task, grads.grad_query, transform):
            _backward_block(block, grads)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        of_row, of_key = (
            shape.head_dim + 4 * shape.value_dim + 8,
            max(shape.head_dim, shape.value_dim),
        )
        inside, rows, item = _tile_bytes(shape, extent, self.scores, (of_row, of_key, 1))
        results = 0
        if extent.direct:
            # In the dtype computed in, and in another that may be asked for.
            every = extent.batch * extent.query_heads * extent.max_queries
            results = every * ((shape.value_dim + 1) * item + shape.value_dim * 8)
        return max(inside, rows + MERGE_WORKSPACE_BYTES) + results + SLACK_BYTES

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        both = shape.head_dim + shape.value_dim
        numbers = 4 * both + 8, 2 * both, 2 + shape.dropout
        inside, _, item = _tile_bytes(shape, extent, self.scores, numbers)
        results = 0
        if extent.direct:
            queries = extent.batch * extent.query_heads * extent.max_queries
            others = extent.batch * extent.key_heads * extent.max_keys
            results = (queries * shape.head_dim + others * both) * (item + 8)
        return inside + results + SLACK_BYTES


class DenseKernel(TiledKernel):
    """``dense``: attention under the CQS mask of a task, as the paper writes it (section 3).

    Scores of whole rows are in memory, in fp32 (fp64 for fp64 inputs), and the pairs that a task
    does not keep are masked one by one, on any device. Every other kernel is compared with it.
    """

    name = "dense"
    rates = (1.0, 1.0)
    scores = WHOLE_ROWS

    def __init__(self) -> None:
        """It has no options."""

    def _form(self, task: TaskTensors) -> tuple[TaskTensors, ScoreTransform]:
        """All pairs as one rectangle, under the CQS mask and the causal mask, if any."""
        n_queries, n_keys = task.query.shape[2], task.key.shape[2]
        mask = torch.from_numpy(task.task.mask())[:n_queries, :n_keys].to(task.query.device)
        if task.is_causal:
            # The tokens of a task are in ascending order, so local positions order them as global
            # ones.
            mask = mask.tril()
        scores = replace(WHOLE_ROWS, kept=lambda block, keys: mask[block.rows, keys])
        every = (Rectangle(0, n_queries, 0, n_keys),) if task.rectangles else ()
        return replace(task, rectangles=every), scores

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time; quadratic in tokens."""
        return _mask_bytes(extent) + super().forward_workspace_bytes(shape, _all_pairs(extent))

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time; quadratic in tokens."""
        return _mask_bytes(extent) + super().backward_workspace_bytes(shape, _all_pairs(extent))


def _all_pairs(extent: Extent) -> Extent:
    return replace(extent, max_queries=extent.n_tokens, max_keys=extent.n_tokens)


def _mask_bytes(extent: Extent) -> int:
    """The CQS mask, its causal half, and what says which pairs of a tile are masked."""
    return 4 * extent.n_tokens * extent.n_tokens
