"""The work of a call in shares, as blocks of rows of heads: for devices, for ranks and
for files.

The query heads of all batch entries stand in one line, one after the other, and the
rows of each head in order. A share of the work is a stretch of this line: the last rows
of one head, whole heads, the first rows of another head. Work is counted in query-key
pairs.

A position in the line is an exact number of heads: 5/2 is where half the work of the
third head is done. So equal shares end exactly between two heads wherever the heads
divide.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from quorum_attention.arithmetic import ceil_div, round_up
from quorum_attention.decomposition.intervals import Interval, cut


class RowBlock(NamedTuple):
    """The same rows of consecutive heads."""

    heads: Interval
    rows: Interval


class RowWork(NamedTuple):
    """The rows of one head, and how much work they are.

    Attributes:
        n_rows: rows of the head.
        tile: rows are cut at multiples of this number; ``n_rows`` if no head is cut.
        pairs_above: gives the pairs of the rows before a row.
    """

    n_rows: int
    tile: int
    pairs_above: Callable[[int], int]

    def pairs(self, rows: Interval) -> int:
        """Return the pairs of some rows."""
        return self.pairs_above(rows.stop) - self.pairs_above(rows.start)

    def row_at(self, pairs: int) -> int:
        """Return the row before which ``pairs`` pairs are done, at the nearest edge of
        a tile."""
        row = bisect_left(range(self.n_rows), pairs, key=self.pairs_above)
        nearest_edge = round(row / self.tile) * self.tile
        return min(self.n_rows, nearest_edge)


def cut_line(work: RowWork, cuts: Sequence[Fraction]) -> list[list[RowBlock]]:
    """Return the blocks of each share of the work.

    Args:
        work: of every head.
        cuts: positions in the line of heads, ascending. A share lies between two
            neighbours.
    """
    points = [_point_at(work, cut_position) for cut_position in cuts]
    return [_stretch(start, stop, work.n_rows) for start, stop in pairwise(points)]


class _Point(NamedTuple):
    """A place in the line of heads: before a row of a head."""

    head: int
    row: int


def _point_at(work: RowWork, position: Fraction) -> _Point:
    head = math.floor(position)
    share_of_head = position - head
    pairs = math.floor(share_of_head * work.pairs_above(work.n_rows))
    row = work.row_at(pairs)
    if row and row == work.n_rows:
        return _Point(head + 1, 0)
    return _Point(head, row)


def _stretch(start: _Point, stop: _Point, n_rows: int) -> list[RowBlock]:
    """Return the blocks between two places."""
    last_head = Interval(stop.head, stop.head + 1)
    if start.head == stop.head:
        blocks = [RowBlock(last_head, Interval(start.row, stop.row))]
    else:
        first_whole = start.head + 1 if start.row else start.head
        first_head = Interval(start.head, first_whole)
        whole_heads = Interval(first_whole, stop.head)
        blocks = [
            RowBlock(first_head, Interval(start.row, n_rows)),
            RowBlock(whole_heads, Interval(0, n_rows)),
            RowBlock(last_head, Interval(0, stop.row)),
        ]
    return [block for block in blocks if block.heads.length and block.rows.length]


def split_at_multiples(span: Interval, size: int) -> list[Interval]:
    """Return a span cut at the multiples of ``size`` inside it."""
    first = round_up(span.start, size)
    multiples = range(first, span.stop, size)
    return list(cut(span, multiples))


def split_groups(heads: Interval, group_size: int, n_runs: int = 1) -> list[Interval]:
    """Return query heads in runs that read either whole key/value heads or a part of
    one.

    Args:
        heads: query heads.
        group_size: query heads that share a key/value head.
        n_runs: the whole groups are cut into so many runs at most, one for each
            exchange of ranks.
    """
    first = ceil_div(heads.start, group_size)
    n_groups = max(0, heads.stop // group_size - first)
    n_runs = max(1, min(n_runs, n_groups))
    edges = [
        (first + n_groups * run // n_runs) * group_size for run in range(n_runs + 1)
    ]
    return list(cut(heads, edges))
