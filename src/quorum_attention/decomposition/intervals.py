"""Half-open intervals [start, stop) of whole numbers: joining, clipping, cutting and
counting.

Lists of intervals are ascending and disjoint, and no interval is empty, unless a
function says otherwise.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

Piece = TypeVar("Piece")

_stop_of = itemgetter(1)


class Interval(NamedTuple):
    """Positions [start, stop)."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many positions."""
        return self.stop - self.start


class Rows(NamedTuple):
    """Consecutive rows of the whole sequence, [start, stop), that are consecutive in a
    task too.

    The first of them lies at position ``local`` of the task.
    """

    start: int
    stop: int
    local: int

    @property
    def length(self) -> int:
        """How many rows."""
        return self.stop - self.start

    def within(self, start: int, stop: int) -> Rows | None:
        """The part at positions [start, stop); None if there is none."""
        low = max(start, self.start)
        high = min(stop, self.stop)
        if low >= high:
            return None
        return Rows(
            low,
            high,
            self.local + low - self.start,
        )

    def continued(self, after: Rows) -> Rows | None:
        """Both as one if ``after`` comes next in the sequence and in the task; else
        None."""
        follows_in_sequence = after.start == self.stop
        follows_in_task = after.local == self.local + self.length
        if not follows_in_sequence or not follows_in_task:
            return None
        return Rows(self.start, after.stop, self.local)


def joined(
    pieces: Iterable[Piece], continued: Callable[[Piece, Piece], Piece | None]
) -> list[Piece]:
    """``pieces`` in their order, with neighbours joined wherever ``continued`` allows
    it.

    Args:
        continued: is given a piece and the next one; returns both as one piece, or None
            if they stay two.
    """
    joined_pieces: list[Piece] = []
    for piece in pieces:
        longer = continued(joined_pieces[-1], piece) if joined_pieces else None
        if longer is None:
            joined_pieces.append(piece)
        else:
            joined_pieces[-1] = longer
    return joined_pieces


def union(intervals: Iterable[tuple[int, int]], gap: int = 1) -> list[Interval]:
    """The positions that lie in any of ``intervals``, which may overlap and be in any
    order.

    Args:
        gap: intervals with fewer than this many positions between them are joined; with
            0 only those that overlap are.
    """

    def continued(before: Interval, after: Interval) -> Interval | None:
        if after.start - before.stop >= gap:
            return None
        return Interval(before.start, max(before.stop, after.stop))

    return joined((Interval(*bounds) for bounds in sorted(intervals)), continued)


def below(intervals: Iterable[tuple[int, int]], end: int) -> list[Interval]:
    """The positions of ``intervals`` that are below ``end``."""
    return [Interval(start, min(stop, end)) for start, stop in intervals if start < end]


def within(
    interval: tuple[int, int], ranges: Sequence[tuple[int, int]]
) -> Iterator[Interval]:
    """The parts of ``interval`` that lie in ``ranges``."""
    start, stop = interval
    for number in range(bisect_right(ranges, start, key=_stop_of), len(ranges)):
        low, high = ranges[number]
        if low >= stop:
            return
        yield Interval(max(start, low), min(stop, high))


def without(
    intervals: Iterable[tuple[int, int]], ranges: Sequence[tuple[int, int]]
) -> list[Interval]:
    """The positions of ``intervals`` that lie in none of ``ranges``."""
    outside: list[Interval] = []
    for start, stop in intervals:
        for low, high in within((start, stop), ranges):
            if start < low:
                outside.append(Interval(start, low))
            start = high
        if start < stop:
            outside.append(Interval(start, stop))
    return outside


def counted(intervals: Iterable[tuple[int, int]]) -> int:
    """The number of positions in ``intervals``."""
    return sum(stop - start for start, stop in intervals)


def covered_twice(intervals: Sequence[tuple[int, int]]) -> list[Interval]:
    """The positions that lie in at least two of ``intervals``.

    The intervals may overlap, be empty, and be in any order.
    """
    # Sorted, the starts at a position come before the stops there.
    starts = [(start, 0) for start, _ in intervals]
    stops = [(stop, 1) for _, stop in intervals]
    covered_intervals: list[Interval] = []
    count = 0
    low = 0
    for position, is_stop in sorted(starts + stops):
        if not is_stop:
            count += 1
            if count == 2:
                low = position
            continue
        if count == 2 and low < position:
            covered_intervals.append(Interval(low, position))
        count -= 1
    return covered_intervals


def cut(interval: tuple[int, int], edges: Sequence[int]) -> Iterator[Interval]:
    """``interval`` cut at those of ``edges`` (ascending) that lie inside it."""
    start, stop = interval
    inside = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
    for low, high in pairwise([start, *inside, stop]):
        if low < high:
            yield Interval(low, high)


def ones(mask: int) -> Iterator[Interval]:
    """The runs of bits that are set in ``mask``, ascending."""
    position = 0
    while mask:
        n_zeros = (mask & -mask).bit_length() - 1
        mask >>= n_zeros
        n_ones = (~mask & (mask + 1)).bit_length() - 1
        mask >>= n_ones
        start = position + n_zeros
        position = start + n_ones
        yield Interval(start, position)
