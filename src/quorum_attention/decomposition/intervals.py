"""Half-open intervals [start, stop) of whole numbers: joining, clipping, cutting and counting.

Lists of intervals are ascending and disjoint, and no interval is empty, unless a function says
otherwise.
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
    """Consecutive rows of the whole sequence, [start, stop), that are consecutive in a task too.

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
        low, high = max(start, self.start), min(stop, self.stop)
        return Rows(low, high, self.local + low - self.start) if low < high else None

    def continued(self, after: Rows) -> Rows | None:
        """Both as one if ``after`` comes next in the sequence and in the task; else None."""
        start, stop, local = self
        next_start, next_stop, next_local = after
        if next_start != stop or next_local != local + stop - start:
            return None
        return Rows(start, next_stop, local)


def joined(
    pieces: Iterable[Piece], continued: Callable[[Piece, Piece], Piece | None]
) -> list[Piece]:
    """``pieces`` in their order, with neighbours joined wherever ``continued`` allows it.

    Args:
        continued: is given a piece and the next one; returns both as one piece, or None if they
            stay two.
    """
    found: list[Piece] = []
    for piece in pieces:
        both = continued(found[-1], piece) if found else None
        if both is None:
            found.append(piece)
        else:
            found[-1] = both
    return found


def union(intervals: Iterable[tuple[int, int]], gap: int = 1) -> list[Interval]:
    """The positions that lie in any of ``intervals``, which may overlap and be in any order.

    Args:
        gap: intervals with fewer than this many positions between them are joined; with 0 only
            those that overlap are.
    """

    def continued(one: Interval, after: Interval) -> Interval | None:
        if after.start - one.stop >= gap:
            return None
        return one if after.stop <= one.stop else Interval(one.start, after.stop)

    return joined((Interval(*bounds) for bounds in sorted(intervals)), continued)


def below(intervals: Iterable[tuple[int, int]], end: int) -> list[Interval]:
    """The positions of ``intervals`` that are below ``end``."""
    return [Interval(start, min(stop, end)) for start, stop in intervals if start < end]


def within(one: tuple[int, int], others: Sequence[tuple[int, int]]) -> Iterator[Interval]:
    """The parts of ``one`` that lie in ``others``."""
    start, stop = one
    for at in range(bisect_right(others, start, key=_stop_of), len(others)):
        low, high = others[at]
        if low >= stop:
            return
        yield Interval(max(start, low), min(stop, high))


def without(
    intervals: Iterable[tuple[int, int]], others: Sequence[tuple[int, int]]
) -> list[Interval]:
    """The positions of ``intervals`` that lie in none of ``others``."""
    found = []
    for start, stop in intervals:
        for low, high in within((start, stop), others):
            if start < low:
                found.append(Interval(start, low))
            start = high
        if start < stop:
            found.append(Interval(start, stop))
    return found


def counted(intervals: Iterable[tuple[int, int]]) -> int:
    """The number of positions in ``intervals``."""
    return sum(stop - start for start, stop in intervals)


def covered(intervals: Sequence[tuple[int, int]], least: int) -> list[Interval]:
    """The positions that lie in at least ``least`` of ``intervals``.

    The intervals may overlap, be empty, and be in any order.
    """
    # A start at p is the number 2 p, a stop 2 p + 1: sorted, starts come first at each position.
    starts = [2 * start for start, _ in intervals]
    stops = [2 * stop + 1 for _, stop in intervals]
    found: list[Interval] = []
    count = low = 0
    for edge in sorted(starts + stops):
        if edge & 1:
            if count == least and low < edge >> 1:
                found.append(Interval(low, edge >> 1))
            count -= 1
        else:
            count += 1
            if count == least:
                low = edge >> 1
    return found


def cut(one: tuple[int, int], edges: Sequence[int]) -> Iterator[Interval]:
    """``one`` cut at those of ``edges`` (ascending) that lie inside it."""
    start, stop = one
    inside = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
    for low, high in pairwise([start, *inside, stop]):
        if low < high:
            yield Interval(low, high)


def ones(mask: int) -> Iterator[Interval]:
    """The runs of bits that are set in ``mask``, ascending."""
    at = 0
    while mask:
        skip = (mask & -mask).bit_length() - 1
        mask >>= skip
        length = (~mask & (mask + 1)).bit_length() - 1
        mask >>= length
        at += skip + length
        yield Interval(at - length, at)
