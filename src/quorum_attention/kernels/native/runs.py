"""Tables for a launch: the runs of keys for each block of queries, or of queries for each of keys.

The table lists, for every block of rows, the runs of kept pairs that touch it; neighbouring runs
are joined. Within a run, pairs have to be tested only at its ragged ends and on its diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition import EMPTY, FULL, Ranges, Rectangle, Task
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.device_copies import to_device
from quorum_attention.kernels.masked.block_table import (
    BLOCK,
    PAIR_BYTES,
    SENT,
    BlockEvaluator,
    blocks_key,
    listed_blocks,
    whole_region,
)
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.native.config import Config
from quorum_attention.kernels.operator_sizes import SLACK_BYTES, UNSPLIT_BYTES
from quorum_attention.kernels.protocol import TaskTensors
from quorum_attention.kernels.torch_private import outside

Axis = Literal["query", "key"]
Ints = NDArray[np.int64]

NO_DIAGONAL = (1 << 31) - 1
"""The ``diagonal`` of a run that no causal mask cuts; sums with it need 64 bits."""

UNLIMITED = (1 << 31) - 1
"""A side of a window that has no limit; sums with it need 64 bits."""
# Farther than any two positions are apart.
_FAR = 1 << 40
Window = tuple[int, int]
"""How far before and after a query its keys may be."""
BLOCK_WINDOW: Window = (0, UNLIMITED)
"""The window of a launch whose pieces have windows of their own."""

WIDTH = 8
"""Columns of pieces: query_start, query_stop, key_start, key_stop, diagonal, distance, mixed and
shift, local positions. A pair (q, k) belongs to a piece if it is within bounds and
``q - k + diagonal >= 0``; its global distance is ``q - k + distance``. ``mixed`` is 1 if bits
decide about each pair, else 0. A query's global position is its local one plus ``shift``; under
rules that is where the bits of a block begin (``kernels_triton.bits_kept``)."""

FIELDS = 10
"""Columns of a table's entries, int32: start and stop of a block's own rows; start, begin, end and
stop of rows of the other side, of which those from ``begin`` to ``end`` are whole tiles of kept
pairs, and the others ragged; and the last four columns of pieces."""


def pieces(rectangles: Sequence[Rectangle], task: Task, geometry: Geometry) -> Ints:
    """What a mask keeps of rectangles, cut where global positions jump: (n, WIDTH), disjoint.

    Args:
        rectangles: local positions.
        task: the task whose tokens these are.
        geometry: the kept pairs. If its band has a lower bound, it is a window: its bounds are
            tested by the kernel, not by ``diagonal``. Where blocks have windows of their own, a
            piece's lower bound is in ``distance``, for a window that ends at the query
            (``BLOCK_WINDOW``).
    """
    found: list[tuple[int, ...]] = []
    windows = geometry.has_block_windows
    by_window = geometry.band.low is not None and not windows
    # Before this one there is no key.
    last = task.spans[-1].stop if task.spans else 0
    for r in rectangles:
        for queries, keys, causal in task.contiguous(r):
            shift, key_shift = queries.start - queries.local, keys.start - keys.local
            distance = shift - key_shift
            for block, band in geometry.within(Ranges.of(*queries[:2], *keys[:2])):
                high = None if by_window else band.high
                if causal and (band.high is None or band.high > 0):
                    high = 0
                verdict = Band(None, high).verdict(block)
                if verdict is EMPTY or band.verdict(block) is EMPTY:
                    continue
                diagonal = NO_DIAGONAL if verdict is FULL or high is None else high + distance
                low = -last if band.low is None else band.low
                (a, b), (c, d) = block
                found.append(
                    (a - shift, b - shift, c - key_shift, d - key_shift, diagonal,
                     distance + low if windows else distance, 0, shift)
                )  # fmt: skip
    return np.array(found, dtype=np.int64).reshape(-1, WIDTH)


def table(found: Ints, n_rows: int, block: int, axis: Axis) -> tuple[Ints, Ints]:
    """Pieces by blocks of rows, neighbouring ones joined to runs.

    Args:
        found: disjoint pieces.
        n_rows: rows along ``axis``.
        block: rows of a block.
        axis: "query": runs of keys by blocks of queries; "key": runs of queries by blocks of keys.

    Returns:
        (starts, entries): entries are pieces; those of block b are rows
        ``starts[b]`` to ``starts[b + 1]``. Bounds along ``axis`` are clipped to the block.

    Raises:
        NotImplementedError: a position or a distance does not fit 32 bits.
    """
    along, across = (0, 2) if axis == "query" else (2, 0)
    first = found[:, along] // block
    count = np.maximum(-(-np.minimum(found[:, along + 1], n_rows) // block) - first, 0)
    piece = np.repeat(np.arange(len(found)), count)
    numbers = first[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)
    entries = found[piece]
    entries[:, along] = np.maximum(numbers * block, entries[:, along])
    stops = np.minimum((numbers + 1) * block, entries[:, along + 1])
    entries[:, along + 1] = np.minimum(stops, n_rows)
    order = np.lexsort((entries[:, across], entries[:, along], numbers))
    numbers, entries = numbers[order], entries[order]
    groups = np.flatnonzero(_begins(numbers, entries, along, across))
    joined = entries[groups]
    if len(groups):
        last = np.append(groups[1:], len(entries)) - 1
        joined[:, across + 1] = entries[last, across + 1]
        # Of entries joined along keys only the last may be causal; along queries, only the first.
        joined[:, 4] = np.minimum.reduceat(entries[:, 4], groups)
    starts = np.searchsorted(numbers[groups], np.arange(ceil_div(n_rows, block) + 1))
    most = int(np.abs(joined).max(initial=0))
    if most > np.iinfo(np.int32).max:
        raise NotImplementedError(
            "kernel 'native' counts positions, and the distances of a window or of ALiBi, in 32 "
            f"bits: up to {np.iinfo(np.int32).max}, got {most}"
        )
    return starts, joined


def _begins(numbers: Ints, entries: Ints, along: int, across: int) -> NDArray[np.bool_]:
    """True for the entries that begin a run, False for those joined to the entry before."""
    first = np.ones(len(entries), dtype=bool)
    before, after = entries[:-1], entries[1:]
    same = numbers[1:] == numbers[:-1]
    same &= (before[:, along] == after[:, along]) & (before[:, along + 1] == after[:, along + 1])
    same &= before[:, across + 1] == after[:, across]
    same &= (before[:, 5:] == after[:, 5:]).all(axis=1)
    # Only the entry at the end of a run (keys) or at its start (queries) may have a diagonal, and
    # the other lies below it. (Blocks with bands of their own may lie otherwise.)
    inner, outer = (before, after) if across == 2 else (after, before)
    same &= inner[:, 4] == NO_DIAGONAL
    same &= inner[:, 3] - 1 - inner[:, 0] <= outer[:, 4]
    first[1:] = ~same
    return first


def bounded(
    entries: torch.Tensor, n_rows: int, tiling: tuple[Axis, Config], window: Window | None
) -> torch.Tensor:
    """Pieces by blocks of rows as entries of a table, (n, FIELDS) int32.

    Args:
        n_rows: rows along the axis.
        window: of the launch.
    """
    axis, config = tiling
    left, right = window or (_FAR, _FAR)
    q0, q1, k0, k1, diagonal, distance, mixed, _ = entries.long().unbind(1)
    low, high, size, step = q0, q1, config.block_m, config.block_n
    if axis == "key":
        low, high, size, step = k0, k1, config.block_n, config.block_m
    first = low // size * size
    whole = (low == first) & (high == (first + size).clamp_max(n_rows)) & (mixed == 0)

    def at_tiles(begin: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``begin`` and the least number of whole tiles with so many rows, from there on."""
        return begin + -(-rows.clamp_min(0) // step) * step

    if axis == "query":
        # No row keeps a key beyond the last row's diagonal; every row keeps the keys up to the
        # first row's diagonal. The left edge of a window may cut the first tiles.
        start = k0.maximum(q0 + distance - left)
        stop = k1.minimum(q1 + diagonal).minimum(q1 + distance + right).maximum(start)
        clear = k1.minimum(first + 1 + diagonal).minimum(first + 1 + distance + right)
        begin = at_tiles(start, q1 - 1 + distance - left - start).minimum(stop)
    else:
        # Rows before the first key's diagonal keep no key; from the last key's diagonal on, all.
        start = q0.maximum(k0 - diagonal).maximum(k0 - distance - right)
        stop = q1.minimum(k1 - distance + left).maximum(start)
        clear = q0.maximum(k1 - 1 - diagonal).maximum(k1 - 1 - distance - right)
        begin = at_tiles(start, torch.where(whole, clear, stop) - start).minimum(stop)
        clear = q1.minimum(k0 - distance + left + 1).minimum(stop)
    end = begin + torch.where(whole, (clear - begin).clamp_min(0), 0) // step * step
    bounds = torch.stack((low, high, start, begin, end, stop), dim=1)
    return torch.cat((bounds, entries[:, 4:]), dim=1).int()


class Runs(NamedTuple):
    """A table, in host memory or on a device.

    Attributes:
        both: starts (blocks + 1,) and entries (n, FIELDS), int32, in one tensor.
        n_blocks: blocks of rows.
        config: of the kernel that reads it.
        aligned: whether every run is known to begin at a key whose global position is a multiple of
            four, as every fourth of its keys then is.
    """

    both: torch.Tensor
    n_blocks: int
    config: Config
    aligned: bool = False

    @classmethod
    def of(
        cls,
        found: Ints,
        n_rows: int,
        tiling: tuple[Axis, Config],
        window: Window | None,
        *,
        pinned: bool,
    ) -> Runs:
        """The table of pieces on the host."""
        axis, config = tiling
        starts, joined = table(found, n_rows, config.rows(axis), axis)
        # A window moves where runs begin.
        shifts = joined[:, 7] - joined[:, 5]
        aligned = window is None and not ((joined[:, 2] % 4).any() or (shifts % 4).any())
        with outside():  # because it is cached
            entries = bounded(torch.from_numpy(joined), n_rows, tiling, window)
            both = torch.cat((torch.from_numpy(starts).int(), entries.flatten()))
            return cls(both.pin_memory() if pinned else both, len(starts) - 1, config, aligned)

    @property
    def starts(self) -> torch.Tensor:
        """Where the entries of each block begin, and the end of the last."""
        return self.both[: self.n_blocks + 1]

    @property
    def entries(self) -> torch.Tensor:
        """Of all blocks, one after the other."""
        return self.both[self.n_blocks + 1 :].view(-1, FIELDS)

    def on(self, device: torch.device) -> Runs:
        """The table on a device."""
        if device.type == "cpu":
            return self
        return self._replace(both=to_device(self.both, device))


# --- Rules that have to be evaluated: the blocks of a task that they keep -------------------------
#
# Which blocks are full and which are partial (``masked/block_table.py``) is found out once. In each
# call rules are evaluated on the partial blocks, as many at a time as there is memory for: the
# kernel is given a bit for each of their pairs.

BIT_BYTES = BLOCK * BLOCK // 8
"""Bytes of a block's bits."""
# The smallest blocks of rows of the native kernel.
_SMALLEST = 16
# Bounds of the bytes for evaluating blocks, and again for their bits.
_LEAST, _MOST = 16 << 20, 256 << 20


class Room(NamedTuple):
    """How much of a task is evaluated at a time.

    Attributes:
        nbytes: for evaluating, and again for bits.
        lanes: batch entries times heads for which rules differ.
        n_queries, n_keys: tokens of the task.
    """

    nbytes: int
    lanes: int
    n_queries: int
    n_keys: int

    @classmethod
    def of(cls, rows_bytes: int, lanes: int, n_queries: int, n_keys: int) -> Room:
        """The room for a task whose rows of queries and values have so many bytes together."""
        return cls(min(max(rows_bytes // 2, _LEAST), _MOST), max(1, lanes), n_queries, n_keys)

    @property
    def at_once(self) -> int:
        """Blocks evaluated at a time."""
        return self._blocks(PAIR_BYTES * BLOCK * BLOCK)

    @property
    def partial(self) -> int:
        """Partial blocks whose bits there are at a time."""
        return self._blocks(BIT_BYTES)

    def _blocks(self, block_bytes: int) -> int:
        """How many blocks there is room for, at most all of the task."""
        every = max(1, ceil_div(self.n_queries, BLOCK) * ceil_div(self.n_keys, BLOCK))
        return min(every, max(1, self.nbytes // (block_bytes * self.lanes)))

    @property
    def runs(self) -> int:
        """The most runs of a launch, along either axis; single blocks may have more."""
        full = max(3 * (self.n_queries + self.n_keys) // BLOCK + 64, self.partial // 2)
        return (full + self.partial) * (BLOCK // _SMALLEST)

    @property
    def device_bytes(self) -> int:
        """Upper bound of the device bytes that evaluating takes, bits and tables among them."""
        evaluated = self.at_once * PAIR_BYTES * BLOCK * BLOCK * self.lanes
        bits = self.partial * BIT_BYTES * self.lanes
        # Positions and pieces of every token, made and padded; the blocks that are sent.
        tokens = 4 * 8 * (self.n_queries + self.n_keys + 2 * BLOCK)
        tokens += 3 * 8 * SENT * self.at_once
        unsplit = 4 * min(evaluated, UNSPLIT_BYTES) + min(bits, UNSPLIT_BYTES)
        unsplit += 4 * min(tokens, UNSPLIT_BYTES)
        # Functions that are the same in all lanes have more blocks in the same bits.
        one = self._replace(lanes=1)
        tables = 2 * 4 * FIELDS * one.runs + 2 * 8 * one.partial
        tables += 4 * ((self.n_queries + self.n_keys) // _SMALLEST + 4)
        return evaluated + bits + tokens + unsplit + tables + SLACK_BYTES


class RuledTask:
    """Rectangles of a task under a geometry with rules."""

    def __init__(
        self, geometry: Geometry, task: TaskTensors, rectangles: tuple[Rectangle, ...]
    ) -> None:
        self._geometry, self._task, self._rectangles = geometry, task, rectangles
        self.key = blocks_key(geometry, task, rectangles)
        depends = geometry.depends(task.query.device)
        batch, heads, n_queries, head_dim = task.query.shape
        n_keys, value_dim = task.value.shape[2:]
        lanes = (batch if depends[0] else 1) * (heads if depends[1] else 1)
        row_bytes = (head_dim + value_dim) * task.query.element_size()
        rows = batch * heads * max(n_queries, n_keys)
        self.room = Room.of(rows * row_bytes, lanes, n_queries, n_keys)

    def pieces(self) -> Ints:
        """Full nodes and parts of partial blocks as ``pieces`` has them, by ascending queries; of
        partial ones ``mixed`` is 1."""
        full, partial, _ = listed_blocks(
            self._geometry, self._task, whole_region(self._task), self._rectangles,
            self.room.nbytes,
        )  # fmt: skip
        nodes = np.concatenate((full, partial))
        order = np.lexsort((nodes[:, 3], nodes[:, 1]))
        found: Ints = np.zeros((len(nodes), WIDTH), dtype=np.int64)
        found[:, :4], found[:, 4], found[:, 6] = nodes[order, 1:], NO_DIAGONAL, order >= len(full)
        return found

    @torch.no_grad()
    def bits(self, blocks: torch.Tensor | None) -> torch.Tensor:
        """``bits_of`` partial blocks, (2, blocks) on the host."""
        device = self._task.query.device
        if blocks is None or not blocks.numel():
            return torch.empty((1, 1, 1, 1, 1), dtype=torch.int32, device=device)  # not read
        evaluator = BlockEvaluator(self._geometry, self._task, whole_region(self._task))
        return bits_of(evaluator, to_device(blocks, device), self.room.at_once)


def bits_of(evaluator: BlockEvaluator, blocks: torch.Tensor, at_once: int) -> torch.Tensor:
    """Which pairs of blocks are kept: (entries, heads, blocks, 128, 4) int32, a bit for a key.

    Args:
        blocks: (2, blocks) int64, their rows and columns, on the device.
        at_once: how many are evaluated at a time.
    """
    shape = (*evaluator.lanes, blocks.shape[1], BLOCK, BLOCK // 32)
    found = torch.empty(shape, dtype=torch.int32, device=blocks.device)
    powers = (1 << torch.arange(8, device=blocks.device)).to(torch.uint8)
    for start in range(0, blocks.shape[1], at_once):
        chosen = slice(start, start + at_once)
        kept = evaluator.kept(*blocks[:, chosen])
        eighths = kept.unflatten(-1, (-1, 8)).to(torch.uint8).mul_(powers)
        packed = eighths.sum(-1, dtype=torch.uint8).view(torch.int32)
        found[:, :, chosen] = packed.permute(1, 2, 0, 3, 4)
        del kept, eighths
    return found
