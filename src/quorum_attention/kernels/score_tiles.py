"""Scores of a task, tile by tile: a block of queries walks its tiles of keys.

Everything here is in the dtype of the statistics (fp32, or fp64 for fp64 inputs), on
the device that computes. In tensors of scores, g query heads share each of hk key
heads: (b, hk, g * rows, keys) is the same memory as (b, h, rows, keys).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.dropout import dropped, dropped_bytes
from quorum_attention.kernels.limits import runs
from quorum_attention.kernels.operator_call import Saved, bias_of_heads
from quorum_attention.kernels.task_tensors import Gradients, Indices, TaskTensors
from quorum_attention.kernels.tensors import positions


@dataclass(frozen=True, slots=True)
class TileLimits:
    """The most that a tile has, all its heads together.

    Attributes:
        pairs: pairs; a single row of the query heads of a key head may have more.
        rows: query rows, and key rows.
        keys: keys of a head.
    """

    pairs: int
    rows: int
    keys: int


# On a CPU tiles stay in the cache. Elsewhere, and for whole rows, fewer launches count
# more.
IN_CACHE = TileLimits(1 << 17, 1024, 512)
LARGE = TileLimits(1 << 21, 8192, 4096)

ScoreFunction = Callable[
    [torch.Tensor, "QueryBlock", slice, bool], tuple[torch.Tensor, torch.Tensor | None]
]
"""Changes scaled scores (b, h, rows, keys) of a block's tile, before they are masked;
it may write to them. Also returns the derivative if the last argument is True; None is
a derivative of 1."""

At = tuple[slice, slice, slice]
"""Batch entries, key heads and queries."""

Kept = Callable[["QueryBlock", slice], torch.Tensor]
"""Which pairs of a block's tile are kept: bool, broadcastable to (b, h, rows, keys)."""


@dataclass(frozen=True, slots=True)
class ScoreTransform:
    """Changes of scores beside those that a task asks for.

    Attributes:
        function, keeps: see their types; None: nothing.
        whole_rows: a tile has all keys of its rows. In the backward probabilities of
            rows that have no other keys are then made to add up to 1, which an lse of
            1,000 in fp32 does not.
        tiles: how large tiles are; None: as is good for the device.
        matrices: the most (b, h, rows, keys) tensors in the dtype computed in that
            ``function`` and ``keeps`` have at a time, their results among them.
        exact_delta: the delta of whole rows is computed from their probabilities, not
            from an output rounded to 16 bits; where that has no columns of its own
            (call/lse_columns.py).
    """

    function: ScoreFunction | None = None
    keeps: Kept | None = None
    whole_rows: bool = False
    tiles: TileLimits | None = None
    matrices: int = 0
    exact_delta: bool = False

    def limits(self, device_type: str) -> TileLimits:
        """Return the limits of tiles on such a device."""
        if self.tiles is not None:
            return self.tiles
        return IN_CACHE if device_type == "cpu" else LARGE

    def most_keys(self, n_keys: int, limits: TileLimits) -> int:
        """Return the most keys of a tile, where there are ``n_keys``."""
        if self.whole_rows:
            return max(1, n_keys)
        return max(1, min(n_keys, limits.keys))


PLAIN = ScoreTransform()
WHOLE_ROWS = ScoreTransform(whole_rows=True, tiles=LARGE)


class QueryBlock:
    """A block of queries: some key heads of some batch entries, with all their query
    heads.

    Args:
        task: the task that the block is a part of.
        rectangle: the rectangle of the task that the block is a part of.
        transform: what is done to its scores.
        at: batch entries, key heads and queries (local positions).
        like: a tensor on the device and in the dtype that is computed in.

    Attributes:
        heads: the query heads.
        most_keys: the most keys of a tile.
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
        entries, key_heads, rows = at
        group = task.query.shape[1] // task.key.shape[1]
        limits = transform.limits(like.device.type)
        self.task = task
        self.rectangle = rectangle
        self.transform = transform
        self.entries = entries
        self.key_heads = key_heads
        self.rows = rows
        self.heads = slice(key_heads.start * group, key_heads.stop * group)
        self.most_keys = transform.most_keys(rectangle.n_keys, limits)
        query = self.of_rows(task.query)  # (b, h, rows, d)
        query = query.to(like.device)
        query = query.to(like.dtype)
        self.query = query.reshape(
            query.shape[0],
            key_heads.stop - key_heads.start,
            -1,
            query.shape[-1],
        )

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the block's part of (b, hq, nq, ...), a view."""
        return tensor[self.entries, self.heads, self.rows]

    def grouped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the block's part of (b, hq, nq, d) as (b, hk, g * rows, d), like
        ``query``."""
        rows = self.of_rows(tensor)
        rows = self._like_query(rows)
        grouped_rows = self.query.shape[:3]
        return rows.reshape(*grouped_rows, tensor.shape[-1])

    def of_keys(self, tensor: torch.Tensor, keys: slice) -> torch.Tensor:
        """Return the block's part of (b, hk, nk, d), like ``query``."""
        part = tensor[self.entries, self.key_heads, keys]
        return self._like_query(part)

    def _like_query(self, part: torch.Tensor) -> torch.Tensor:
        part = part.to(self.query.device)
        return part.to(self.query.dtype)

    def by_head(self, scores: torch.Tensor) -> torch.Tensor:
        """Return (b, hk, g * rows, keys) as (b, h, rows, keys), a view."""
        heads = self.heads.stop - self.heads.start
        rows = self.rows.stop - self.rows.start
        return scores.view(
            scores.shape[0],
            heads,
            rows,
            scores.shape[-1],
        )

    def indices(self, keys: slice) -> Indices:
        """Return the pairs of its queries and some keys, by their numbers in the whole
        call; on the device that computes, though the task's tensors may be
        elsewhere."""
        return self.task.indices(
            self._pairs_with(keys),
            self.entries,
            self.heads,
            self.query.device,
        )

    def _pairs_with(self, keys: slice) -> Rectangle:
        return Rectangle(
            self.rows.start,
            self.rows.stop,
            keys.start,
            keys.stop,
        )

    def tiles(self) -> Iterator[slice]:
        """Yield its keys, by tiles: those that none of its queries sees are left
        out."""
        start = self.rectangle.key_start
        stop = self.rectangle.key_stop
        if self.rectangle.causal:
            stop = min(stop, self.rows.stop)
        yield from runs(slice(start, stop), self.most_keys)

    def scores(
        self, key: torch.Tensor, keys: slice, *, derivative: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scores of a tile and the derivative of their change.

        Args:
            key: (b, hk, keys, d), of the block.
            keys: the tile.
            derivative: whether the derivative is asked for.

        Returns:
            Scores (b, hk, g * rows, keys), -inf where a pair is not kept. The
            derivative, of the same shape, or None where it is 1 or not asked for.
        """
        scores = self.query @ key.mT
        scores.mul_(self.task.scale)
        by_head = self.by_head(scores)
        slope = None
        if self.transform.function is not None:
            by_head, slope = self.transform.function(by_head, self, keys, derivative)
        self._add_bias_(by_head, keys)
        self._mask_(by_head, keys)
        if slope is not None:
            slope = slope.reshape(scores.shape)
        return by_head.view(scores.shape), slope

    def _add_bias_(self, scores: torch.Tensor, keys: slice) -> None:
        """Add the bias to a tile (b, h, rows, keys), in place."""
        bias = self.task.bias(self._pairs_with(keys))
        bias = bias_of_heads(bias, self.entries, self.heads)
        if bias is not None:
            scores.add_(bias)

    def _mask_(self, scores: torch.Tensor, keys: slice) -> None:
        """Write -inf to a tile (b, h, rows, keys) where pairs are not kept, in
        place."""
        if self.rectangle.causal and keys.stop - 1 > self.rows.start:
            self._mask_later_keys_(scores, keys)
        if self.transform.keeps is None:
            return
        is_kept = self.transform.keeps(self, keys)
        scores.masked_fill_(~is_kept, -torch.inf)

    def _mask_later_keys_(self, scores: torch.Tensor, keys: slice) -> None:
        """Write -inf to a tile (b, h, rows, keys) of a causal rectangle, which is a
        square on the diagonal of local positions, where keys come after the query."""
        rows = self.rows
        device = scores.device
        queries = torch.arange(rows.start, rows.stop, device=device)
        columns = torch.arange(keys.start, keys.stop, device=device)
        is_after = columns > queries.unsqueeze(-1)  # (rows, keys)
        scores.masked_fill_(is_after, -torch.inf)

    def dropped(self, like: torch.Tensor, keys: slice) -> torch.Tensor | None:
        """Return which pairs of a tile are dropped, in the shape of ``like`` (b, hk, g
        * rows, keys); None without dropout."""
        task = self.task
        if task.dropout is None:
            return None
        is_dropped = dropped(
            task.dropout.at(self.heads.start, self.entries.start),
            like.shape[0],
            self.heads.stop - self.heads.start,
            positions(
                task.task,
                self.rows.start,
                self.rows.stop,
                like.device,
            ),
            task.task.segments(keys.start, keys.stop),
        )
        return is_dropped.view(like.shape)


# By how much the logarithm of a row's sum may be off if it has no other keys, by bytes
# of a number: as a share of its lse, and besides. In fp32 and float64 delta of other
# rows is as exact.
_ROUNDING = {2: (2.0**-20, 2.0**-12), 4: (2.0**-22, 2.0**-20), 8: (2.0**-47, 2.0**-44)}


class BackwardRows:
    """The rows of a block as a backward reads them.

    Attributes:
        block: the block.
        grad_out: (b, hk, g * rows, dv), upstream.
        delta: (b, hk, g * rows, 1), rowsum(grad_out * out).
        lse: (b, hk, g * rows, 1), 0 in rows without keys.
    """

    def __init__(self, block: QueryBlock, saved: Gradients | Saved) -> None:
        self.block = block
        self.grad_out = block.grouped(saved.grad_out)
        out = block.grouped(saved.out)
        products = self.grad_out * out
        self.delta = products.sum(dim=-1, keepdim=True)
        lse = saved.lse.unsqueeze(-1)
        lse = block.grouped(lse)
        # In a row without keys exp(-inf - 0) is 0, where -inf - -inf would be NaN.
        self.lse = lse.masked_fill(lse == -torch.inf, 0.0)

    def pairs(
        self, key: torch.Tensor, keys: slice, *, derivative: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return what a backward needs of the pairs of a tile, each (b, hk, g * rows,
        keys).

        Args:
            key: (b, hk, keys, d), of the block.
            keys: the tile.
            derivative: whether the derivative of the change of scores is asked for.

        Returns:
            The probabilities; the gradient of scores after their change; the derivative
            of that change (``QueryBlock.scores``); and which pairs are dropped.
        """
        block = self.block
        dropout = block.task.dropout
        p, slope = block.scores(key, keys, derivative=derivative)
        p.sub_(self.lse)
        p.exp_()
        drops = block.dropped(p, keys)
        value = block.of_keys(block.task.value, keys)
        ds = self.grad_out @ value.mT
        del value
        if dropout is not None and drops is not None:
            ds.mul_(dropout.rescale)
            ds.masked_fill_(drops, 0.0)
        delta = self.delta
        if block.transform.whole_rows:
            delta = self.delta_of(p, ds)
        ds.sub_(delta)
        ds.mul_(p)
        return p, ds, slope, drops

    def score_gradients(self, key: torch.Tensor, keys: slice) -> torch.Tensor:
        """Return the gradient of a tile's scores after their change, (b, h, rows,
        keys); 0 of hidden pairs, which have no part in anything: ``pairs`` may have NaN
        there, 0 times infinity.

        Args:
            key: (b, hk, keys, d), of the block.
            keys: the tile.
        """
        p, ds, _, _ = self.pairs(key, keys, derivative=False)
        ds.masked_fill_(p == 0.0, 0.0)
        return self.block.by_head(ds)

    def delta_of(self, p: torch.Tensor, dp: torch.Tensor) -> torch.Tensor:
        """Return delta; by ``exact_delta`` of rows that have no keys but those of
        ``p``.

        The probabilities of such rows are made to add up to 1, in place; other rows are
        left alone. Rows are told apart by the logarithm of their sum, which rounding
        moves as much as it moves lse: beside an lse of a million, the sum itself may be
        anything from 0 on.
        """
        total = p.sum(dim=-1, keepdim=True)
        itemsize = self.block.task.query.dtype.itemsize
        share, offset = _ROUNDING[itemsize]
        rounding = self.lse.abs() * share
        rounding.add_(offset)
        rounding.clamp_(max=0.01)
        log_total = total.log()
        has_other_keys = log_total.abs_() > rounding
        divisor = total.masked_fill_(has_other_keys, 1.0)
        p.div_(divisor)
        if not self.block.transform.exact_delta:
            return self.delta
        exact_delta = (p * dp).sum(dim=-1, keepdim=True)
        return torch.where(has_other_keys, self.delta, exact_delta)


def query_blocks(
    task: TaskTensors, like: torch.Tensor, transform: ScoreTransform
) -> Iterator[QueryBlock]:
    """Yield the blocks of a task; all query heads of a key head are in one tile.

    Args:
        like: a tensor on the device and in the dtype that is computed in.
    """
    if not task.rectangles:
        return
    batch, key_heads = task.key.shape[:2]
    group = task.query.shape[1] // key_heads
    limits = transform.limits(task.query.device.type)
    for rectangle in task.rectangles:
        keys = transform.most_keys(rectangle.n_keys, limits)
        queries_by_pairs = limits.pairs // (group * keys)
        queries_by_rows = limits.rows // group
        queries = max(1, min(queries_by_pairs, queries_by_rows))
        rows = group * min(rectangle.n_queries, queries)
        # A lane is a key head of a batch entry.
        lanes_by_pairs = limits.pairs // (rows * keys)
        lanes_by_rows = limits.rows // max(rows, keys)
        lanes = min(lanes_by_pairs, lanes_by_rows)
        heads = max(1, min(key_heads, lanes))
        entries = 1
        if heads == key_heads:
            entries = max(1, lanes // heads)
        blocks = product(
            runs(slice(0, batch), entries),
            runs(slice(0, key_heads), heads),
            runs(slice(rectangle.query_start, rectangle.query_stop), queries),
        )
        for at in blocks:
            yield QueryBlock(task, rectangle, transform, at, like)


class TileSizes:
    """Bounds of the largest tile of a call, in rectangles of any size up to the
    largest.

    Attributes:
        rows: query rows.
        keys: key rows.
        pairs: pairs.
        itemsize: bytes of a number in the dtype that is computed in.
    """

    def __init__(
        self, shape: CallShape, extent: Extent, transform: ScoreTransform
    ) -> None:
        limits = transform.limits(shape.device_type)
        group = extent.group
        longest_tile = transform.most_keys(extent.max_keys, limits)
        # A single row of the query heads of a key head may be more than the limits.
        most_rows = max(limits.rows, group)
        most_keys = max(limits.rows, longest_tile)
        most_pairs = max(limits.pairs, group * longest_tile)
        pairs_of_a_head = limits.pairs // max(1, group)
        self.itemsize = shape.state_dtype.itemsize
        self.rows = max(1, min(extent.rows, most_rows))
        self.keys = min(extent.key_rows, most_keys)
        self.pairs = min(extent.rows * extent.max_keys, most_pairs)
        self._most_pairs_of_a_head = max(pairs_of_a_head, longest_tile)
        self._shape = shape
        self._extent = extent
        self._matrices = transform.matrices

    def nbytes(self, by_query: int, by_key: int, by_pair: int) -> int:
        """Return the bytes of the tile, of which a pass holds so many numbers for each
        query row, for each key row and for each pair."""
        numbers = self.rows * by_query
        numbers += self.keys * by_key
        numbers += self.pairs * (by_pair + self._matrices)
        nbytes = numbers * self.itemsize
        nbytes += self._bias_bytes()
        nbytes += self._dropped_bytes()
        return nbytes

    def _bias_bytes(self) -> int:
        """Return the bytes of the bias, made for all heads of the task at a time, and
        of what is added to scores, of the dtype computed in."""
        shape = self._shape
        extent = self._extent
        if shape.bias is None:
            return 0
        entries = extent.batch if shape.bias.batch else 1
        heads = extent.query_heads if shape.bias.heads else 1
        pairs = min(extent.max_queries * extent.max_keys, self._most_pairs_of_a_head)
        bias = entries * heads * pairs * shape.bias_dtype.itemsize
        added = 8 * self.pairs
        return bias + added

    def _dropped_bytes(self) -> int:
        if not self._shape.dropout:
            return 0
        pairs_of_row = ceil_div(self.pairs, self.rows)
        return dropped_bytes(1, 1, self.rows, pairs_of_row)
