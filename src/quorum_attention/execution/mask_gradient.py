"""The gradient of an additive mask, tile by tile, beside a backward by any kernel (our
method).

For each pair, given the global log-sum-exp,

    dS = P (dP - delta),   P = exp(S - lse),   dP = <dO_i, V_j>,   delta = <dO_i, O_i>

(with dropout dP times Z, kernels/dropout.py). The mask's gradient is dS, summed over
the dimensions that the mask broadcasts over. A pair needs nothing but its query row and
its key, so pairs are cut into plain tiles, whatever the pass beside it is cut into:
vendor kernels, which do not return dS, need not be replaced, and every route has this
gradient.

The walk goes by blocks of the *result*. All tiles that are summed into a block are
computed one after the other, added up in the state's dtype (fp32, or fp64), and the
block is written once. So the result may lie anywhere and needs no wider copy; it comes
out the same each time; and if memory runs out, the block that failed is begun anew with
smaller tiles: nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition import (
    EMPTY,
    Decomposition,
    Pairs,
    Ranges,
    Rectangle,
)
from quorum_attention.errors import first_line, is_out_of_memory
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.head_groups import Group, group_part
from quorum_attention.execution.job import PassJob
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.dropout import dropped_bytes
from quorum_attention.kernels.limits import runs
from quorum_attention.kernels.operator_call import Saved
from quorum_attention.kernels.score_tiles import PLAIN, BackwardRows, QueryBlock
from quorum_attention.units import counted

# Without a budget: tiles that a CPU's cache holds, and that keep a GPU busy.
_HOST_BYTES = 8 << 20
_DEVICE_BYTES = 1 << 30
_MOST_QUERIES = 2048
_MOST_KEYS = 2048
# Allocators round up by about this much, for the few tensors alive at once.
_SLACK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Tile:
    """Most key/value heads, queries, keys and batch entries of one tile."""

    heads: int
    queries: int
    keys: int
    entries: int = 1

    def smaller(self) -> Tile | None:
        """Half of it; None for a single pair of one head group."""
        if self.entries > 1:
            return replace(self, entries=ceil_div(self.entries, 2))
        if self.heads > 1:
            return replace(self, heads=ceil_div(self.heads, 2))
        if self.keys > 1 and self.keys >= self.queries:
            return replace(self, keys=ceil_div(self.keys, 2))
        if self.queries > 1:
            return replace(self, queries=ceil_div(self.queries, 2))
        return None


def tile_bytes(shape: CallShape, tile: Tile, mask_bytes: int) -> int:
    """Upper bound of the device bytes that a tile takes.

    Args:
        mask_bytes: of an element of the mask.
    """
    input_bytes = shape.dtype.itemsize
    state_bytes = shape.state_dtype.itemsize
    query_heads = tile.heads * shape.queries_per_key_head
    n_rows = tile.entries * query_heads * tile.queries
    n_keys = tile.entries * tile.heads * tile.keys
    n_pairs = n_rows * tile.keys
    widths = shape.kv_width
    # Inputs as they came, and in the state's dtype.
    n_inputs = (n_rows + n_keys) * widths
    inputs = n_inputs * (input_bytes + state_bytes)
    # The product of gradient and output, and a few numbers for each row.
    row_numbers = 2 * shape.value_dim + 6
    rows = n_rows * row_numbers * state_bytes
    # Scores, dP, a copy while one of them is summed; the mask, and the sums so far.
    pair_bytes = 6 * state_bytes + 2 * mask_bytes
    pair_bytes += shape.bias_dtype.itemsize + 1
    pairs = n_pairs * pair_bytes
    total = inputs + rows + pairs + _SLACK_BYTES
    if shape.dropout:
        total += dropped_bytes(tile.entries, query_heads, tile.queries, tile.keys)
    return total


def fitting(
    shape: CallShape, device: torch.device, budget: int | None, mask_bytes: int
) -> Tile:
    """The largest tile worth computing at once that takes at most ``budget`` bytes
    (None: what is usual on ``device``); the smallest there is if none does."""
    limit = _DEVICE_BYTES if backend_of(device).own_memory else _HOST_BYTES
    if budget is not None:
        limit = min(limit, budget)
    tile = Tile(
        heads=shape.kv_heads,
        queries=min(shape.n_queries, _MOST_QUERIES),
        keys=min(shape.n_keys, _MOST_KEYS),
        entries=_n_last_entries(shape),
    )
    while tile_bytes(shape, tile, mask_bytes) > limit:
        smaller = tile.smaller()
        if smaller is None:
            break
        tile = smaller
    return tile


def _n_last_entries(shape: CallShape) -> int:
    """How many entries the last batch dimension has; 1 without one."""
    return shape.batch_shape[-1] if shape.batch_shape else 1


def add_up_mask_gradient(
    job: PassJob, saved: Saved, target: torch.Tensor, budget: int | None
) -> list[str]:
    """Fill ``target`` with the gradient of the call's mask.

    Args:
        saved: as the caller gave it, on any device: (*batch, heads, n_queries,
            value_dim) and without it, of the whole rows.
        target: of the mask's shape, on any device, of any floating dtype.
        budget: most device bytes to take; None: no limit but what there is.

    Returns:
        A line for each time that memory ran out and smaller tiles were taken.

    Raises:
        Out-of-memory errors of the allocator: not even a tile of one pair can be
            computed.
    """
    assert job.bias is not None
    mask = job.bias.mask
    if mask.dim() <= 3:
        mask = mask.unsqueeze(0)
    walk = _Walk(job, saved, target.reshape(mask.shape), job.problem.pairs)
    element_bytes = mask.element_size()
    if job.kernel.own_attention:
        # The test of a pair takes a distance of 64 bits, and a few flags.
        element_bytes += 8
    tile = fitting(job.shape, job.device, budget, element_bytes)
    recoveries: list[str] = []
    # Blocks are those of the tile that began; a failed one is computed by smaller
    # tiles.
    for block in walk.blocks(tile):
        tile = _fill_with_recovery(walk, block, tile, recoveries)
    return recoveries


def _fill_with_recovery(
    walk: _Walk, block: _MaskBlock, tile: Tile, recoveries: list[str]
) -> Tile:
    """Write one block of the gradient, by smaller tiles if memory runs out.

    Args:
        recoveries: gets a line for each time that memory ran out.

    Returns:
        The tile that fitted.
    """
    while True:
        try:
            walk.fill(block, tile)
            return tile
        except Exception as error:
            smaller = tile.smaller()
            if not is_out_of_memory(error) or smaller is None:
                raise
            # Only the text stays: the traceback would hold the failed tile's tensors.
            failure = first_line(error)
        tile = smaller
        backend_of(walk.job.device).give_back_cached()
        queries = counted(tile.queries, "query", "queries")
        keys = counted(tile.keys, "key")
        heads = counted(tile.heads, "key/value head")
        recoveries.append(
            f"mask gradient out of memory ({failure}): tiles of {queries} by {keys} of "
            f"{heads}, batch entries at a time: {tile.entries}"
        )


_MaskBlock = tuple[slice, ...]
"""A block of the result, or a tile: positions of each batch dimension, key/value heads,
queries and keys. Without batch dimensions the only entry is a dimension of its own."""


@dataclass(slots=True)
class _Walk:
    """The tensors of a call, and where its mask's gradient goes.

    Attributes:
        saved: the upstream gradient, the output and the log-sum-exp.
        target: of the shape of the mask, (*batch or 1, heads or 1, n_queries or 1,
            n_keys or 1), with one batch dimension at least.
        pairs: which pairs the call keeps, as far as that is known.
    """

    job: PassJob
    saved: Saved
    target: torch.Tensor
    pairs: Pairs

    def blocks(self, tile: Tile) -> Iterator[_MaskBlock]:
        """Blocks of the result: no larger than a tile in dimensions that the mask
        has."""
        shape = self.job.shape
        batch_shape = shape.batch_shape or (1,)
        sizes = (*batch_shape, shape.kv_heads, shape.n_queries, shape.n_keys)
        all_positions = tuple(slice(0, size) for size in sizes)
        cuts: list[Iterable[slice]] = []
        for side, tile_size, mask_size in zip(
            all_positions, self._tile_sizes(tile), self.target.shape, strict=True
        ):
            cuts.append(runs(side, tile_size) if mask_size > 1 else (side,))
        return product(*cuts)

    def _tile_sizes(self, tile: Tile) -> tuple[int, ...]:
        """Most positions of a tile in each dimension: one in batch dimensions before
        the last."""
        outer_sizes = (1,) * (self.target.dim() - 4)
        return (*outer_sizes, tile.entries, tile.heads, tile.queries, tile.keys)

    def fill(self, block: _MaskBlock, tile: Tile) -> None:
        """Write one block of the gradient: the sum of all its tiles."""
        # Batch dimensions before the last have one position here.
        target = self.target[self._cuts(block)].flatten(0, -4)
        total: torch.Tensor | None = None
        for tile_block, part in self._parts(block, tile):
            if total is None and part.shape == target.shape:
                total = part
                continue
            if total is None:
                total = part.new_zeros(target.shape)
            cuts = self._cuts(tile_block, block)
            total[cuts[-4:]].add_(part)
            # The next tile is computed without it.
            del part
        if total is None:
            target.zero_()
        else:
            target.copy_(total)

    def _parts(
        self, block: _MaskBlock, tile: Tile
    ) -> Iterator[tuple[_MaskBlock, torch.Tensor]]:
        """The tiles that are summed into a block, and the part of each."""
        *cuts_of_rows, cuts_of_keys = map(runs, block, self._tile_sizes(tile))
        tile_keys = tuple(cuts_of_keys)
        has_whole_rows = tile.keys >= self.job.shape.n_keys
        for place in product(*cuts_of_rows):
            *_, queries = place
            rows: BackwardRows | None = None
            for keys in tile_keys:
                if self._is_empty(queries, keys):
                    continue
                if rows is None:
                    rows = self._rows(place, has_whole_rows)
                yield (*place, keys), self._tile(rows, keys)

    def _is_empty(self, queries: slice, keys: slice) -> bool:
        """Whether the call keeps no pair of these queries and keys."""
        positions = Ranges.from_bounds(
            queries.start,
            queries.stop,
            keys.start,
            keys.stop,
        )
        return self.pairs.verdict_of(positions) is EMPTY

    def _cuts(
        self, block: _MaskBlock, within: _MaskBlock | None = None
    ) -> tuple[slice, ...]:
        """The mask's part for a block, in positions of the mask, or of its part for the
        block ``within``; dimensions that it broadcasts over are whole."""
        # The mask has a position for each query head, blocks one for each key/value
        # head.
        head_dim = self.target.dim() - 3
        cuts: list[slice] = []
        for dim, (side, size) in enumerate(zip(block, self.target.shape, strict=True)):
            if size == 1:
                cuts.append(slice(None))
                continue
            first = 0 if within is None else within[dim].start
            factor = self.job.shape.queries_per_key_head if dim == head_dim else 1
            low = (side.start - first) * factor
            high = (side.stop - first) * factor
            cuts.append(slice(low, high))
        return tuple(cuts)

    def _group(self, place: tuple[slice, ...]) -> Group:
        """The entries and heads of a tile."""
        *batch, heads, _ = place
        shape = self.job.shape
        first = 0
        for side, size in zip(batch, shape.batch_shape or (1,), strict=True):
            first = first * size + side.start
        n_entries = batch[-1].stop - batch[-1].start
        return Group(
            range(first, first + n_entries),
            shape.batch_shape,
            heads.start,
            heads.stop,
            shape.queries_per_key_head,
        )

    def _rows(self, place: tuple[slice, ...], has_whole_rows: bool) -> BackwardRows:
        """Some queries of a head group, on the computing device.

        Args:
            place: a tile's batch entries, heads and queries.
            has_whole_rows: whether tiles have all keys of a row.
        """
        job = self.job
        shape = job.shape
        group = self._group(place)
        *_, queries = place
        sequence = Decomposition(shape.n_tokens).task(())
        limits = (shape.n_queries, shape.n_keys)
        task = job.task_tensors(sequence, (), group, limits)
        exact = has_whole_rows and shape.dtype != torch.float32
        if shape.sinks or shape.columns:
            exact = False
        transform = job.kernel.scores_of_pairs() or PLAIN
        transform = replace(transform, whole_rows=exact, exact_delta=exact)
        rectangle = Rectangle(
            queries.start,
            queries.stop,
            0,
            shape.n_keys,
            shape.is_causal,
        )
        like = torch.empty(0, dtype=shape.state_dtype, device=job.device)
        kv_heads = group.kv_stop - group.kv_start
        rows_of_group = (slice(0, group.n_entries), slice(0, kv_heads), queries)
        block = QueryBlock(
            task,
            rectangle,
            transform,
            rows_of_group,
            like,
        )
        saved = Saved(
            group_part(self.saved.grad_out, group, "query"),
            group_part(self.saved.out, group, "query"),
            group_part(self.saved.lse, group, "query"),
        )
        return BackwardRows(block, saved)

    def _tile(self, rows: BackwardRows, keys: slice) -> torch.Tensor:
        """A tile's part of the gradient: (entries or 1, heads or 1, queries or 1, keys
        or 1), summed over what the mask broadcasts over."""
        block = rows.block
        key = block.of_keys(block.task.key, keys)  # (b, hk, keys, d)
        ds = rows.score_gradients(key, keys)  # (b, h, queries, keys)
        sizes = self.target.shape[-4:]
        summed = [dim for dim, size in enumerate(sizes) if size == 1]
        if not summed:
            return ds
        return ds.sum(dim=summed, keepdim=True)
