"""Tables for a launch: the runs of keys for each block of queries, or of queries for each of keys.

The table lists, for every block of rows, the runs of the rectangles that touch it; neighbouring
runs are joined. Within a run, pairs have to be tested only at its ragged ends and on its diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Rectangle, Task

NO_DIAGONAL = (1 << 31) - 1
"""The ``diagonal`` of a run that no causal mask cuts; sums with it need 64 bits."""

FIELDS = ("query_start", "query_stop", "key_start", "key_stop", "diagonal", "distance",
          "mixed")  # fmt: skip
"""Columns of a table's entries, int32, local positions. A pair (q, k) belongs to the run if it is
within bounds and ``q - k + diagonal >= 0``; its global distance is ``q - k + distance``. ``mixed``
is 1 if the group bits of the tokens decide about each pair, else 0. A table for dropout has one
column more, ``shift``: a query's global position is its local one plus that. One for tried blocks
has ``word`` there: where the words of its block begin (``kernels/masked/native_tried.py``)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle, or a part of one within which global distances are local ones plus a constant.

    Attributes:
        rectangle: local positions.
        distance: added to ``q - k`` of local positions, it gives that of global positions.
        diagonal: a pair is kept only if ``q - k + diagonal >= 0``, local positions; None: that of a
            causal rectangle, or none.
        shift: added to local positions of queries, it gives global ones.
    """

    rectangle: Rectangle
    distance: int = 0
    diagonal: int | None = None
    shift: int = 0


def pieces(rectangles: Sequence[Rectangle], task: Task | None) -> list[Piece]:
    """The rectangles as they are (``task`` None), or cut where global positions jump.

    Args:
        rectangles: local positions.
        task: the task whose tokens these are; needed if anything depends on global positions.
    """
    live = [r for r in rectangles if r.n_queries > 0 and r.n_keys > 0]
    if task is None:
        return [Piece(r) for r in live]
    found = []
    for r in live:
        for queries, keys, causal in task.contiguous(r):
            first, low = queries.local, keys.local
            part = Rectangle(first, first + queries.length, low, low + keys.length, causal)
            shift = queries.start - first
            found.append(Piece(part, shift - (keys.start - low), shift=shift))
    return found


def within_window(found: Sequence[Piece], left: int, right: int) -> list[Piece]:
    """The pieces with at least one pair inside a sliding window; -1 is no limit on that side."""
    kept = []
    for piece in found:
        r = piece.rectangle
        farthest = r.query_stop - 1 - r.key_start + piece.distance
        nearest = r.query_start - (r.key_stop - 1) + piece.distance
        if (left < 0 or nearest <= left) and (right < 0 or farthest >= -right):
            kept.append(piece)
    return kept


def columns(shifts: bool) -> int:
    """Columns of a table, with shifts or without."""
    return len(FIELDS) + shifts


def is_aligned(entries: NDArray[np.int32]) -> bool:
    """Whether every run of a table with shifts begins at a key whose global position is a multiple
    of four, as every fourth of its keys then is."""
    shifts = entries[:, 7] - entries[:, 5]
    return not ((entries[:, 2] % 4).any() or (shifts % 4).any())


def table(
    found: Sequence[Piece],
    n_rows: int,
    block: int,
    axis: Literal["query", "key"],
    *,
    shifts: bool = False,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Runs by blocks of rows.

    Args:
        found: disjoint pieces.
        n_rows: rows along ``axis``.
        block: rows of a block.
        axis: "query": runs of keys by blocks of queries; "key": runs of queries by blocks of keys.
        shifts: whether the table is for dropout, with a column more.

    Returns:
        (starts, entries): entries (n, 7 or 8), columns as in ``FIELDS``; those of block b are rows
        ``starts[b]`` to ``starts[b + 1]``. Bounds along ``axis`` are clipped to the block.

    Raises:
        NotImplementedError: a position or a distance does not fit 32 bits.
    """
    n_blocks = -(-n_rows // block)
    width = columns(shifts)
    parts = [_by_block(piece, n_rows, block, axis, width) for piece in found]
    if not parts:
        return np.zeros(n_blocks + 1, np.int32), np.zeros((0, width), np.int32)
    numbers = np.concatenate([number for number, _ in parts])
    entries = np.concatenate([entry for _, entry in parts])
    along, across = (0, 2) if axis == "query" else (2, 0)
    order = np.lexsort((entries[:, across], entries[:, along], numbers))
    numbers, entries = numbers[order], entries[order]
    first = _joins(numbers, entries, along, across)
    groups = np.flatnonzero(first)
    joined = entries[groups]
    last = np.append(groups[1:], len(entries)) - 1
    joined[:, across + 1] = entries[last, across + 1]
    # Of entries joined along keys only the last may be causal; along queries, only the first.
    joined[:, 4] = np.minimum.reduceat(entries[:, 4], groups)
    starts = np.searchsorted(numbers[groups], np.arange(n_blocks + 1))
    if int(np.abs(joined).max()) > np.iinfo(np.int32).max:
        raise NotImplementedError(
            "kernel 'native' counts positions, and the distances of a window or of ALiBi, in 32 "
            f"bits: up to {np.iinfo(np.int32).max}, got {int(np.abs(joined).max())}"
        )
    return starts.astype(np.int32), joined.astype(np.int32)


def _by_block(
    piece: Piece, n_rows: int, block: int, axis: str, width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    r = piece.rectangle
    start, stop = (r.query_start, r.query_stop) if axis == "query" else (r.key_start, r.key_stop)
    stop = min(stop, n_rows)
    numbers = np.arange(start // block, -(-stop // block), dtype=np.int64)
    entries = np.empty((len(numbers), width), np.int64)
    entries[:, 0], entries[:, 1] = r.query_start, r.query_stop
    entries[:, 2], entries[:, 3] = r.key_start, r.key_stop
    at = 0 if axis == "query" else 2
    entries[:, at] = np.maximum(numbers * block, start)
    entries[:, at + 1] = np.minimum((numbers + 1) * block, stop)
    entries[:, 4] = r.key_start - r.query_start if r.causal else NO_DIAGONAL
    if piece.diagonal is not None:
        entries[:, 4] = piece.diagonal
    entries[:, 5] = piece.distance
    entries[:, 6] = 0
    entries[:, 7:] = piece.shift
    return numbers, entries


def _joins(
    numbers: NDArray[np.int64], entries: NDArray[np.int64], along: int, across: int
) -> NDArray[np.bool_]:
    """True for the entries that begin a run, False for those joined to the entry before."""
    first = np.ones(len(entries), dtype=bool)
    if len(entries) < 2:
        return first
    before, after = entries[:-1], entries[1:]
    same = numbers[1:] == numbers[:-1]
    same &= (before[:, along] == after[:, along]) & (before[:, along + 1] == after[:, along + 1])
    same &= before[:, across + 1] == after[:, across]
    same &= (before[:, 5:] == after[:, 5:]).all(axis=1)
    # Only the entry at the end of a run (keys) or at its start (queries) may have a diagonal.
    inner = before if across == 2 else after
    same &= inner[:, 4] == NO_DIAGONAL
    first[1:] = ~same
    return first


@dataclass(frozen=True, slots=True)
class Runs:
    """A table on a device.

    Attributes:
        starts: (blocks + 1,) int32.
        entries: (n, 7 or 8) int32.
        n_blocks: blocks of rows.
        aligned: of a table for dropout, ``is_aligned``, and no window moves where a run begins.
    """

    starts: torch.Tensor
    entries: torch.Tensor
    n_blocks: int
    aligned: bool = False


# Run tables for arbitrary group bits: any 64-bit word for every token (paper, section 4).
#
# A pair (q, k) is kept where ``bits[q] & bits[k] == 0``. The verdict on a tile takes constant time:
# it follows from the bitwise OR and AND of the words of its two blocks.
#
#     clear   OR_q & OR_k == 0      no bit is on both sides: every pair is kept
#     masked  AND_q & AND_k != 0    some bit is on both sides of every pair: none is kept
#     mixed   otherwise             the kernel tests every pair
#
# Masked tiles are in no run, so they are never loaded.

# Cells of the verdict matrix that are computed at a time.
_CELLS = 1 << 24


def summaries(bits: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bitwise (OR, AND) of the words of every block of ``block`` (a power of two) tokens.

    Args:
        bits: (n,) int64. The last block may have fewer tokens.
    """
    n = bits.numel()
    n_blocks = -(-n // block)
    folded = []
    for operator, neutral in ((torch.bitwise_or, 0), (torch.bitwise_and, -1)):
        words = torch.full((n_blocks * block,), neutral, dtype=torch.int64, device=bits.device)
        words[:n] = bits
        words = words.view(n_blocks, block)
        while words.shape[1] > 1:
            half = words.shape[1] // 2
            words = operator(words[:, :half], words[:, half:])
        folded.append(words[:, 0])
    return folded[0], folded[1]


def runs_of_bits(
    query_bits: torch.Tensor,
    key_bits: torch.Tensor,
    is_causal: bool,
    block: int,
    other: int,
    axis: Literal["query", "key"],
) -> Runs:
    """The runs of a monolithic call under group bits.

    Args:
        query_bits, key_bits: (n,), (m,) int64, on the device of the call.
        is_causal: keep only keys at or before the query.
        block: tokens of a block along ``axis``.
        other: tokens of a block along the other axis.
        axis: "query": runs of keys by blocks of queries; "key": runs of queries by blocks of keys.

    The host waits for the device once, because it has to know the number of runs.
    """
    along, across = (query_bits, key_bits) if axis == "query" else (key_bits, query_bits)
    n, m, device = along.numel(), across.numel(), along.device
    any_a, all_a = summaries(along, block)
    any_b, all_b = summaries(across, other)
    first_a = torch.arange(any_a.numel(), device=device) * block
    first_b = torch.arange(any_b.numel(), device=device) * other
    found = []
    step = max(1, _CELLS // max(1, any_b.numel()))
    for start in range(0, any_a.numel(), step):
        part = slice(start, start + step)
        verdict = torch.full((any_a[part].numel(), any_b.numel()), PARTIAL, dtype=torch.int8,
                             device=device)  # fmt: skip
        verdict.masked_fill_((any_a[part, None] & any_b[None]) == 0, FULL)
        verdict.masked_fill_((all_a[part, None] & all_b[None]) != 0, EMPTY)
        if is_causal:
            low, high = first_a[part, None], first_b[None]
            if axis == "query":
                verdict.masked_fill_(high > low + block - 1, EMPTY)
            else:
                verdict.masked_fill_(high + other - 1 < low, EMPTY)
        found.append(_runs_of_rows(verdict, start))
    rows = torch.cat(found)
    entries = torch.empty((rows.shape[0], len(FIELDS)), dtype=torch.int32, device=device)
    at, beside = (0, 2) if axis == "query" else (2, 0)
    entries[:, at] = rows[:, 0] * block
    entries[:, at + 1] = ((rows[:, 0] + 1) * block).clamp_max(n)
    entries[:, beside] = rows[:, 1] * other
    entries[:, beside + 1] = (rows[:, 2] * other).clamp_max(m)
    entries[:, 4] = 0 if is_causal else NO_DIAGONAL
    entries[:, 5] = 0
    entries[:, 6] = rows[:, 3] == PARTIAL
    blocks = torch.arange(any_a.numel() + 1, device=device)
    starts = torch.searchsorted(rows[:, 0].contiguous(), blocks).int()
    return Runs(starts, entries, any_a.numel())


def _runs_of_rows(verdict: torch.Tensor, first: int) -> torch.Tensor:
    """(row, start, stop, verdict) of maximal runs of clear or of mixed tiles, row by row."""
    n_rows, n_columns = verdict.shape
    changed = torch.ones((n_rows, n_columns + 1), dtype=torch.bool, device=verdict.device)
    changed[:, 1:-1] = verdict[:, 1:] != verdict[:, :-1]
    edges = changed.nonzero()
    row, column = edges[:, 0], edges[:, 1]
    # Every edge but the last of a row begins a run, which ends at the next edge.
    begins = column < n_columns
    stops = torch.roll(column, -1)
    kind = verdict[row[begins], column[begins]].long()
    runs = torch.stack([row[begins] + first, column[begins], stops[begins], kind], dim=1)
    return runs[kind != EMPTY]
