"""The gradient of an additive mask, tile by tile, beside a backward by any kernel (our method).

For each pair, given the global log-sum-exp,

    dS = P (dP - delta),   P = exp(S - lse),   dP = <dO_i, V_j>,   delta = <dO_i, O_i>

(with dropout dP times Z, kernels/dropout.py). The mask's gradient is dS, summed over the dimensions
that the mask broadcasts over. A pair needs nothing but its query row and its key, so pairs are cut
into plain tiles, whatever the pass beside it is cut into: vendor kernels, which do not return dS,
need not be replaced, and every route has this gradient.

The walk goes by blocks of the *result*. All tiles that are summed into a block are computed one
after the other, added up in the state's dtype (fp32, or fp64), and the block is written once. So
the result may lie anywhere and needs no wider copy; it comes out the same each time; and if memory
runs out, the block that failed is begun anew with smaller tiles: nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition import EMPTY, Decomposition, Pairs, Ranges, Rectangle
from quorum_attention.errors import first_line, is_out_of_memory
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.head_groups import Group, group_part
from quorum_attention.execution.job import PassJob
from quorum_attention.kernels.dropout import dropped_bytes
from quorum_attention.kernels.limits import runs
from quorum_attention.kernels.protocol import CallShape, Saved
from quorum_attention.kernels.score_tiles import PLAIN, BackwardRows, QueryBlock
from quorum_attention.units import counted

# Without a budget: tiles that a CPU's cache holds, and that keep a GPU busy.
_HOST_BYTES, _DEVICE_BYTES = 8 << 20, 256 << 20
_MOST_QUERIES, _MOST_KEYS = 2048, 2048
# What allocators round up by, for the few tensors alive at once.
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
        return replace(self, queries=ceil_div(self.queries, 2)) if self.queries > 1 else None


def tile_bytes(shape: CallShape, tile: Tile, mask_bytes: int) -> int:
    """Upper bound of the device bytes that a tile takes.

    Args:
        mask_bytes: of an element of the mask.
    """
    item, wide = shape.dtype.itemsize, shape.state_dtype.itemsize
    lanes = tile.entries * tile.heads
    keys = lanes * tile.keys
    rows = lanes * shape.queries_per_key_head * tile.queries
    widths = shape.head_dim + shape.value_dim
    # Inputs as they came, and in the state's dtype; the product of gradient and output.
    found = (rows + keys) * widths * (item + wide) + rows * (2 * shape.value_dim + 6) * wide
    # Scores, dP, a copy while one of them is summed; the mask, and the sums so far.
    pairs = rows * tile.keys
    if shape.dropout:
        heads = tile.heads * shape.queries_per_key_head
        found += dropped_bytes(tile.entries, heads, tile.queries, tile.keys)
    bias = shape.bias_dtype.itemsize
    return found + pairs * (6 * wide + bias + 2 * mask_bytes + 1) + _SLACK_BYTES


def fitting(shape: CallShape, device: torch.device, left: int | None, mask_bytes: int) -> Tile:
    """The largest tile worth computing at once that takes at most ``left`` bytes (None: what is
    usual on ``device``); the smallest there is if none does."""
    usual = _DEVICE_BYTES if backend_of(device).own_memory else _HOST_BYTES
    most = usual if left is None else min(usual, left)
    entries = shape.batch_shape[-1] if shape.batch_shape else 1
    sides = min(shape.n_queries, _MOST_QUERIES), min(shape.n_keys, _MOST_KEYS)
    tile = Tile(shape.kv_heads, *sides, entries)
    while tile_bytes(shape, tile, mask_bytes) > most:
        after = tile.smaller()
        if after is None:
            break
        tile = after
    return tile


def add_up_mask_gradient(
    job: PassJob, given: Saved, target: torch.Tensor, left: int | None
) -> list[str]:
    """Fill ``target`` with the gradient of the call's mask.

    Args:
        given: as the caller gave it, on any device: (*batch, heads, n_queries, value_dim) and
            without it, of the whole rows.
        target: of the mask's shape, on any device, of any floating dtype.
        left: most device bytes to take; None: no limit but what there is.

    Returns:
        A line for each time that memory ran out and smaller tiles were taken.

    Raises:
        Out-of-memory errors of the allocator: not even a tile of one pair can be computed.
    """
    assert job.bias is not None
    mask = job.bias.mask
    mask = mask if mask.dim() > 3 else mask.unsqueeze(0)
    target = target.reshape(mask.shape)
    walk = _Walk(job, given, target, job.problem.pairs)
    # What is tested of each pair takes a distance of 64 bits, and a few flags.
    tested = 8 if job.kernel.own_attention else 0
    tile = fitting(job.shape, job.device, left, mask.element_size() + tested)
    recoveries: list[str] = []
    for index in product(*(range(n) for n in mask.shape[:-4])):
        # Blocks are those of the tile that began; a failed one is computed by smaller tiles.
        for block in _blocks(mask, job.shape, tile):
            while True:
                try:
                    walk.fill(index, block, tile)
                    break
                except Exception as error:
                    smaller = tile.smaller()
                    if not is_out_of_memory(error) or smaller is None:
                        raise
                    # Only the text stays: the traceback would hold the failed tile's tensors.
                    tile, failure = smaller, first_line(error)
                backend_of(job.device).give_back_cached()
                recoveries.append(
                    f"mask gradient out of memory ({failure}): tiles of "
                    f"{counted(tile.queries, 'query', 'queries')} by "
                    f"{counted(tile.keys, 'key')} of {counted(tile.heads, 'key/value head')}, "
                    f"batch entries at a time: {tile.entries}"
                )
    return recoveries


class _MaskBlock(NamedTuple):
    """Entries of the last batch dimension, key/value heads, queries and keys: of a block of the
    result, or of a tile."""

    entries: slice
    heads: slice
    queries: slice
    keys: slice


def _blocks(mask: torch.Tensor, shape: CallShape, tile: Tile) -> Iterator[_MaskBlock]:
    """Blocks of the result: no larger than a tile in dimensions that the mask has."""
    n_entries = shape.batch_shape[-1] if shape.batch_shape else 1
    every = (n_entries, shape.kv_heads, shape.n_queries, shape.n_keys)
    most = (tile.entries, tile.heads, tile.queries, tile.keys)
    sizes = zip(every, most, mask.shape[-4:], strict=True)
    cuts = [runs(slice(0, n), size if of_mask > 1 else n) for n, size, of_mask in sizes]
    yield from (_MaskBlock(*cut) for cut in product(*cuts))


@dataclass(slots=True)
class _Walk:
    """The tensors of a call, and where its mask's gradient goes.

    Attributes:
        target: of the shape of the mask, (*batch or 1, heads or 1, n_queries or 1, n_keys or 1),
            with one batch dimension at least.
        pairs: which pairs the call keeps, as far as that is known.
    """

    job: PassJob
    given: Saved
    target: torch.Tensor
    pairs: Pairs

    def fill(self, index: tuple[int, ...], block: _MaskBlock, tile: Tile) -> None:
        """Write one block of the gradient: the sum of all its tiles."""
        total: torch.Tensor | None = None
        at: tuple[int | slice, ...] = (*index, *self._cuts(block))
        shape, begins = self.target[at].shape, tuple(part.start for part in block)
        along_rows = (
            runs(block.entries, tile.entries),
            runs(block.heads, tile.heads),
            runs(block.queries, tile.queries),
        )
        for outer, entries, heads, queries in product(self._outer(index), *along_rows):
            rows = None
            for keys in runs(block.keys, tile.keys):
                positions = Ranges.of(queries.start, queries.stop, keys.start, keys.stop)
                if self.pairs.of(positions) is EMPTY:
                    continue
                if rows is None:
                    whole_rows = tile.keys >= self.job.shape.n_keys
                    rows = self._rows(self._group(outer, entries, heads), queries, whole_rows)
                part = self._tile(rows, keys)
                if total is None and part.shape == shape:
                    total = part
                    continue
                if total is None:
                    total = torch.zeros(shape, dtype=part.dtype, device=part.device)
                total[self._cuts(_MaskBlock(entries, heads, queries, keys), begins)].add_(part)
                del part
        if total is None:
            self.target[at].zero_()
        else:
            self.target[at].copy_(total)

    def _outer(self, index: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Where, in all batch dimensions but the last, pairs get the mask at ``index``."""
        sizes = zip(self.job.shape.batch_shape[:-1], self.target.shape[:-4], index, strict=True)
        return product(*(range(n) if m == 1 else (i,) for n, m, i in sizes))

    def _group(self, outer: tuple[int, ...], entries: slice, heads: slice) -> Group:
        """Some heads of a run of batch entries."""
        shape = self.job.shape
        numbers = range(1)
        if shape.batch_shape:
            first = 0
            for place, size in zip(outer, shape.batch_shape[:-1], strict=True):
                first = first * size + place
            first *= shape.batch_shape[-1]
            numbers = range(first + entries.start, first + entries.stop)
        return Group(
            numbers, shape.batch_shape, heads.start, heads.stop, shape.queries_per_key_head
        )

    def _cuts(self, block: _MaskBlock, within: tuple[int, ...] = (0, 0, 0, 0)) -> tuple[slice, ...]:
        """The mask's part for a block, in positions from ``within`` on; dimensions that it
        broadcasts over are whole."""
        times = (1, self.job.shape.queries_per_key_head, 1, 1)
        return tuple(
            slice((part.start - first) * factor, (part.stop - first) * factor)
            if n > 1
            else slice(None)
            for part, first, factor, n in zip(
                block, within, times, self.target.shape[-4:], strict=True
            )
        )

    def _rows(self, group: Group, queries: slice, whole_rows: bool) -> BackwardRows:
        """Some queries of a head group, on the computing device."""
        job, shape = self.job, self.job.shape
        whole = Decomposition(shape.n_tokens).task(())
        task = job.task_tensors(whole, (), group, (shape.n_queries, shape.n_keys))
        exact = whole_rows and shape.dtype != torch.float32 and not (shape.sinks or shape.columns)
        transform = replace(
            job.kernel.scores_of_pairs() or PLAIN, whole_rows=exact, exact_delta=exact
        )
        r = Rectangle(queries.start, queries.stop, 0, shape.n_keys, shape.is_causal)
        like = torch.empty(0, dtype=shape.state_dtype, device=job.device)
        at = slice(0, len(group.entry_numbers)), slice(0, group.kv_stop - group.kv_start), queries
        given = self.given
        saved = (group_part(t, group, "query") for t in (given.grad_out, given.out, given.lse))
        return BackwardRows(QueryBlock(task, r, transform, at, like), Saved(*saved))

    def _tile(self, rows: BackwardRows, keys: slice) -> torch.Tensor:
        """A tile's part of the gradient: (entries or 1, heads or 1, queries or 1, keys or 1),
        summed over what the mask broadcasts over."""
        block = rows.block
        key = block.of_keys(block.task.key, keys)
        p, ds, _, _ = rows.pairs(key, keys, derivative=False)
        # 0 times a value that is not finite is NaN, and a hidden pair has no part in anything.
        ds.masked_fill_(p == 0.0, 0.0)
        ds = block.by_head(ds)
        over = [dim for dim, n in enumerate(self.target.shape[-4:]) if n == 1]
        return ds.sum(dim=over, keepdim=True) if over else ds
