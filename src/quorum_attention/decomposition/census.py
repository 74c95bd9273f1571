"""The tile census: how many score tiles are masked, clear or mixed (paper, Appendix
A.2).

A tile is *clear* if its rows and its columns have no group bit in common, *masked* if
one bit is in all of its rows and all of its columns, else *mixed*. Two numbers for the
rows and two for the columns decide it: the bitwise OR and the bitwise AND of their
group bits. Under a mask a tile has to be kept by the mask as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_

from quorum_attention.argument_checks import whole_number
from quorum_attention.decomposition.decomposition import Task
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.pairs import (
    EMPTY,
    FULL,
    PARTIAL,
    Pairs,
    Ranges,
    Verdict,
    kept_by_both,
    quarters,
    walk,
)


@dataclass(frozen=True, slots=True)
class Census:
    """Shares of score tiles (fractions of one).

    Attributes:
        masked: no pair is kept.
        clear: every pair is kept.
        mixed: pairs have to be tested one by one.
        tiles: how many there are of all kinds.
    """

    masked: float
    clear: float
    mixed: float
    tiles: int


def census(tasks: Iterable[Task], pairs: Pairs, tile: int = 128) -> Census:
    """Count the tiles of all ``tasks`` together.

    Args:
        pairs: which pairs the call keeps; if causal, only tiles on or below the
            diagonal are counted, and one on the diagonal is told by its other rules.
        tile: tokens along each side of a tile.

    Raises:
        ValueError: ``tile`` is no whole number from 1.
    """
    tile = whole_number(tile, "tile", 1)
    counts: Counter[Verdict] = Counter()
    counts_by_bits: dict[_GroupBits, Counter[Verdict]] = {}
    for task in tasks:
        task_tiles = _TaskTiles(task, pairs, tile)
        if task_tiles.positions_matter:
            counts += _count_tiles(task_tiles)
            continue
        # Many tasks differ in their positions alone.
        bits = task_tiles.bits_by_line
        if bits not in counts_by_bits:
            counts_by_bits[bits] = _count_tiles(task_tiles)
        counts += counts_by_bits[bits]
    tiles = sum(counts.values())
    n = max(1, tiles)
    return Census(
        counts[EMPTY] / n,
        counts[FULL] / n,
        counts[PARTIAL] / n,
        tiles,
    )


def _count_tiles(tiles: _TaskTiles) -> Counter[Verdict]:
    """Count the verdicts of a task's tiles, in blocks of tiles that are alike."""
    counts: Counter[Verdict] = Counter()
    n_lines = len(tiles.bits_by_line)
    if not n_lines:
        return counts
    all_tiles = Ranges.from_bounds(0, n_lines, 0, n_lines)
    for block, verdict in walk(all_tiles, tiles.verdict, quarters):
        is_above_diagonal = tiles.is_causal and block.keys.start >= block.queries.stop
        if not is_above_diagonal:
            n_tiles = block.queries.length * block.keys.length
            counts[verdict] += n_tiles
    return counts


_GroupBits = tuple[tuple[int, ...], ...]
"""The group bits of the spans in each row of a task's tiles."""


class _TaskTiles:
    """The tiles of a task, by group bits and mask.

    Attributes:
        bits_by_line: the group bits of the spans in each row of tiles; columns have the
            same.
        positions_matter: whether verdicts depend on where the task's tokens are, and
            not on group bits alone.
    """

    def __init__(self, task: Task, pairs: Pairs, tile: int) -> None:
        self.task = task
        self.tile = tile
        self.is_causal = pairs.is_causal
        # Whether a tile is above the diagonal is told by its number, so that shares are
        # of whole tiles.
        self.mask_verdict = replace(pairs, is_causal=False).verdict_of
        self.bits_by_line: _GroupBits = tuple(
            tuple(span.bits for span in task.between(start, start + tile))
            for start in range(0, task.n_tokens, tile)
        )
        stop = max((span.stop for span in task.spans), default=0)
        is_inside = stop <= min(pairs.n_queries, pairs.n_keys)
        self.positions_matter = pairs.verdict is not None or not is_inside

    def verdict(self, block: Ranges) -> Verdict:
        """Return the verdict on a block of tiles."""
        rows, columns = block
        if self.is_causal and columns.stop - 1 > rows.start:
            return EMPTY if columns.start >= rows.stop else PARTIAL
        row_bits = self._bits(rows)
        column_bits = self._bits(columns)
        bits_of_all_rows = reduce(and_, row_bits)
        bits_of_all_columns = reduce(and_, column_bits)
        if bits_of_all_rows & bits_of_all_columns:
            return EMPTY
        bits_of_any_row = reduce(or_, row_bits)
        bits_of_any_column = reduce(or_, column_bits)
        has_common_bit = bits_of_any_row & bits_of_any_column
        by_bits = PARTIAL if has_common_bit else FULL
        positions = Ranges(self._positions(rows), self._positions(columns))
        return kept_by_both(by_bits, self.mask_verdict(positions))

    def _bits(self, lines: Interval) -> list[int]:
        """Return the group bits of the spans in these lines of tiles."""
        lines_of_bits = self.bits_by_line[lines.start : lines.stop]
        return [bits for line in lines_of_bits for bits in line]

    def _positions(self, lines: Interval) -> Interval:
        """Return the positions between the first and the last token of these lines of
        tiles."""
        first = lines.start * self.tile
        stop = min(lines.stop * self.tile, self.task.n_tokens)
        segments = self.task.segments(first, stop)
        first_run = segments[0]
        last_run = segments[-1]
        return Interval(first_run.start, last_run.stop)
