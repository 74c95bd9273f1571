"""Tables for a launch: the runs of keys for each block of queries, or of queries for
each of keys.

The table lists, for every block of rows, the runs of kept pairs that touch it;
neighbouring pieces are joined to runs. Within a run, pairs have to be tested only at
its ragged ends and on its diagonal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.arithmetic import ceil_div
from quorum_attention.kernels.device_copies import to_device
from quorum_attention.kernels.masked.block_nodes import consecutive
from quorum_attention.kernels.native.columns import EntryColumn, PieceColumn
from quorum_attention.kernels.native.config import Axis, Tiling
from quorum_attention.kernels.native.pieces import NO_DIAGONAL, Ints, Window
from quorum_attention.kernels.torch_private import no_torch_modes

# Farther than any two positions are apart.
_FAR = 1 << 40
_LARGEST_INT32 = np.iinfo(np.int32).max


class _SideColumns(NamedTuple):
    """The columns of pieces with the bounds of one side."""

    start: PieceColumn
    stop: PieceColumn


_QUERIES = _SideColumns(PieceColumn.QUERY_START, PieceColumn.QUERY_STOP)
_KEYS = _SideColumns(PieceColumn.KEY_START, PieceColumn.KEY_STOP)


def table(pieces: Ints, n_rows: int, block: int, axis: Axis) -> tuple[Ints, Ints]:
    """Pieces by blocks of rows, neighbouring ones joined to runs.

    Args:
        pieces: disjoint pieces.
        n_rows: rows along ``axis``.
        block: rows of a block.
        axis: "query": runs of keys by blocks of queries; "key": runs of queries by
            blocks of keys.

    Returns:
        (starts, runs): runs have the columns of pieces; those of block b are rows
        ``starts[b]`` to ``starts[b + 1]``. Bounds along ``axis`` are clipped to the
        block.

    Raises:
        NotImplementedError: a position or a distance does not fit 32 bits.
    """
    along = _QUERIES if axis == "query" else _KEYS
    across = _KEYS if axis == "query" else _QUERIES
    blocks, parts = _cut_by_blocks(pieces, n_rows, block, along)
    order = np.lexsort((parts[:, across.start], parts[:, along.start], blocks))
    blocks = blocks[order]
    parts = parts[order]
    firsts = np.flatnonzero(_begins_run(blocks, parts, along, across))
    runs = _joined(parts, firsts, across)
    n_blocks = ceil_div(n_rows, block)
    starts = np.searchsorted(blocks[firsts], np.arange(n_blocks + 1))
    largest = int(np.abs(runs).max(initial=0))
    if largest > _LARGEST_INT32:
        raise NotImplementedError(
            "kernel 'native' counts positions, and the distances of a window or of "
            f"ALiBi, in 32 bits: up to {_LARGEST_INT32}, got {largest}"
        )
    return starts, runs


def _cut_by_blocks(
    pieces: Ints, n_rows: int, block: int, along: _SideColumns
) -> tuple[Ints, Ints]:
    """The parts of pieces within blocks of rows: (the number of each part's block,
    parts)."""
    first_blocks = pieces[:, along.start] // block
    stop_rows = np.minimum(pieces[:, along.stop], n_rows)
    stop_blocks = -(-stop_rows // block)
    counts = np.maximum(stop_blocks - first_blocks, 0)
    blocks = consecutive(first_blocks, counts).astype(np.int64)
    parts = np.repeat(pieces, counts, axis=0)
    block_starts = blocks * block
    block_stops = np.minimum(block_starts + block, n_rows)
    part_starts = parts[:, along.start]
    part_stops = parts[:, along.stop]
    np.maximum(part_starts, block_starts, out=part_starts)
    np.minimum(part_stops, block_stops, out=part_stops)
    return blocks, parts


def _begins_run(
    blocks: Ints, parts: Ints, along: _SideColumns, across: _SideColumns
) -> NDArray[np.bool_]:
    """True for the parts that begin a run, False for those joined to the part
    before."""
    before = parts[:-1]
    after = parts[1:]
    joins = blocks[1:] == blocks[:-1]
    joins &= before[:, across.stop] == after[:, across.start]
    equal_columns = (
        along.start,
        along.stop,
        PieceColumn.DISTANCE,
        PieceColumn.MIXED,
        PieceColumn.SHIFT,
    )
    for column in equal_columns:
        joins &= before[:, column] == after[:, column]
    # Only the part at the end of a run (keys) or at its start (queries) may have a
    # diagonal, and the other lies below it. (Blocks with bands of their own may lie
    # otherwise.)
    inner = before if across is _KEYS else after
    outer = after if across is _KEYS else before
    joins &= inner[:, PieceColumn.DIAGONAL] == NO_DIAGONAL
    last_key = inner[:, PieceColumn.KEY_STOP] - 1
    first_query = inner[:, PieceColumn.QUERY_START]
    outer_diagonal = outer[:, PieceColumn.DIAGONAL]
    joins &= last_key - first_query <= outer_diagonal
    begins = np.ones(len(parts), dtype=bool)
    begins[1:] = ~joins
    return begins


def _joined(parts: Ints, firsts: Ints, across: _SideColumns) -> Ints:
    """The runs of parts, given the number of each run's first part."""
    runs = parts[firsts]
    if len(firsts) == 0:
        return runs
    lasts = np.append(firsts[1:], len(parts)) - 1
    runs[:, across.stop] = parts[lasts, across.stop]
    # Along keys only the last part of a run may be causal; along queries, only the
    # first.
    diagonals = parts[:, PieceColumn.DIAGONAL]
    runs[:, PieceColumn.DIAGONAL] = np.minimum.reduceat(diagonals, firsts)
    return runs


def bounded(
    runs: torch.Tensor, n_rows: int, tiling: Tiling, window: Window | None
) -> torch.Tensor:
    """Runs with the columns of pieces as entries of a table, (n, ``len(EntryColumn)``)
    int32.

    Args:
        n_rows: rows along the axis.
        window: of the launch.
    """
    runs = runs.long()
    along = _QUERIES if tiling.axis == "query" else _KEYS
    across = _KEYS if tiling.axis == "query" else _QUERIES
    low = runs[:, along.start]
    high = runs[:, along.stop]
    _, _, _, _, diagonal, distance, mixed, shift = runs.unbind(1)
    block_first = low // tiling.block * tiling.block
    block_stop = (block_first + tiling.block).clamp_max(n_rows)
    has_whole_block = (low == block_first) & (high == block_stop)
    has_clear_part = has_whole_block & (mixed == 0)
    reach = _reach(diagonal, distance, window or (_FAR, _FAR), tiling.axis)
    # No row of the block keeps a pair outside of these.
    start = runs[:, across.start].maximum(low + reach.first)
    stop = runs[:, across.stop].minimum(high + reach.last)
    stop = stop.maximum(start)
    # Between these every row keeps all pairs. The ragged part before them is whole
    # tiles; a block of keys that has no clear part has nothing else.
    n_ragged = high - 1 + reach.first - start
    if tiling.axis == "key":
        n_ragged = torch.where(has_clear_part, n_ragged, stop - start)
    begin = _at_tiles(start, n_ragged, tiling.step).minimum(stop)
    clear_stop = runs[:, across.stop].minimum(low + 1 + reach.last)
    n_clear = (clear_stop - begin).clamp_min(0)
    n_clear = torch.where(has_clear_part, n_clear, 0)
    end = begin + n_clear // tiling.step * tiling.step
    columns = (
        low,
        high,
        start,
        begin,
        end,
        stop,
        diagonal,
        distance,
        mixed,
        shift,
    )
    return torch.stack(columns, dim=1).int()


class _Reach(NamedTuple):
    """The first and the last row of the other side that a row keeps, counted from the
    row, each (n,) int64."""

    first: torch.Tensor
    last: torch.Tensor


def _reach(
    diagonal: torch.Tensor, distance: torch.Tensor, window: Window, axis: Axis
) -> _Reach:
    """The reach of rows along an axis."""
    window_left, window_right = window
    last_key = diagonal.minimum(distance + window_right)
    first_key = distance - window_left
    # A query keeps a key if the key keeps the query.
    return (
        _Reach(first_key, last_key)
        if axis == "query"
        else _Reach(-last_key, -first_key)
    )


def _at_tiles(start: torch.Tensor, n_rows: torch.Tensor, step: int) -> torch.Tensor:
    """``start`` and the least number of whole tiles with so many rows, from there
    on."""
    n_tiles = -(-n_rows.clamp_min(0) // step)
    return start + n_tiles * step


class Runs(NamedTuple):
    """A table, in host memory or on a device.

    Attributes:
        packed: starts (blocks + 1,) and entries (n, ``len(EntryColumn)``), int32, in
            one tensor.
        n_blocks: blocks of rows.
        tiling: of the kernel that reads it.
        aligned: whether every run is known to begin at a key whose global position is a
            multiple of four, as every fourth of its keys then is.
    """

    packed: torch.Tensor
    n_blocks: int
    tiling: Tiling
    aligned: bool = False

    @classmethod
    def of_pieces(
        cls,
        pieces: Ints,
        n_rows: int,
        tiling: Tiling,
        window: Window | None,
        *,
        pinned: bool,
    ) -> Runs:
        """The table of pieces on the host."""
        starts, runs = table(pieces, n_rows, tiling.block, tiling.axis)
        with no_torch_modes():  # because it is cached
            entries = bounded(torch.from_numpy(runs), n_rows, tiling, window)
            packed = torch.cat((torch.from_numpy(starts).int(), entries.flatten()))
            if pinned:
                packed = packed.pin_memory()
            # A window moves where runs begin.
            aligned = window is None and _begin_at_fours(runs)
            return cls(packed, len(starts) - 1, tiling, aligned)

    @property
    def starts(self) -> torch.Tensor:
        """Where the entries of each block begin, and the end of the last."""
        return self.packed[: self.n_blocks + 1]

    @property
    def entries(self) -> torch.Tensor:
        """The entries of all blocks, one after the other."""
        first = self.n_blocks + 1
        return self.packed[first:].view(-1, len(EntryColumn))

    def on(self, device: torch.device) -> Runs:
        """The table on a device."""
        return self._replace(packed=to_device(self.packed, device))


def _begin_at_fours(runs: Ints) -> bool:
    """Whether the first key of every run has a local and a global position divisible by
    four."""
    shifts = runs[:, PieceColumn.SHIFT]
    key_shifts = shifts - runs[:, PieceColumn.DISTANCE]
    key_starts = runs[:, PieceColumn.KEY_START]
    if (key_starts % 4).any():
        return False
    return not (key_shifts % 4).any()
