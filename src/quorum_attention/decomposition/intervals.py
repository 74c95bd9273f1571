"""Half-open intervals of whole numbers, and what is done with them everywhere.

Whatever lies at neighbouring positions is [start, stop), and is joined, clipped, cut and counted
here. A piece that carries more than its bounds (where it lies in a task, who has it) says itself
what continues it (``joined``). Lists of intervals are ascending and disjoint unless said
otherwise; none is empty.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Neighbouring rows of a task: [start, stop) of the whole sequence, and where the first of
    them lies in the task."""

    start: int
    stop: int
    local: int

    @property
    def length(self) -> int:
        """How many rows."""
        return self.stop - self.start

    def below(self, n: int) -> Rows | None:
        """The part at positions < ``n``, None where nothing is left."""
        if self.start >= n:
            return None
        return Rows(self.start, min(self.stop, n), self.local)

    def within(self, start: int, stop: int) -> Rows | None:
        """The part at positions [start, stop), None where nothing is left."""
        low, high = max(start, self.start), min(stop, self.stop)
        return Rows(low, high, self.local + low - self.start) if low < high else None

    def continued(self, after: Rows) -> Rows | None:
        """Both as one where ``after`` goes on with these, in the sequence and in the task."""
        start, stop, local = self
        next_start, next_stop, next_local = after
        if next_start != stop or next_local != local + stop - start:
            return None
        return Rows(start, next_stop, local)


def joined(
    pieces: Iterable[Piece], continued: Callable[[Piece, Piece], Piece | None]
) -> list[Piece]:
    """``pieces`` in their order, each made one with those that go on with it.

    Args:
        continued: of a piece and the one after it, both as one; None where they stay two.
    """
    rest = iter(pieces)
    try:
        last = next(rest)
    except StopIteration:
        return []
    found: list[Piece] = []
    for piece in rest:
        both = continued(last, piece)
        if both is None:
            found.append(last)
            last = piece
        else:
            last = both
    found.append(last)
    return found


def union(intervals: Iterable[tuple[int, int]], gap: int = 1) -> list[Interval]:
    """The positions that any of ``intervals`` has, which may come in any order and overlap.

    Args:
        gap: intervals with fewer than so many positions between them become one; with 0, only
            those that overlap.
    """

    def continued(one: Interval, after: Interval) -> Interval | None:
        if after.start - one.stop >= gap:
            return None
        return one if after.stop <= one.stop else Interval(one.start, after.stop)

    return joined((Interval(*bounds) for bounds in sorted(intervals)), continued)


def below(intervals: Iterable[tuple[int, int]], end: int) -> list[Interval]:
    """Their positions < ``end``."""
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
    """The positions of ``intervals`` that are in none of ``others``."""
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
    """How many positions they have."""
    return sum(stop - start for start, stop in intervals)


def covered(intervals: Sequence[tuple[int, int]], least: int) -> list[Interval]:
    """The positions that at least so many of ``intervals`` have, which may come in any order,
    overlap, and be empty."""
    # Twice the place, plus one where an interval ends: at one place, what begins comes first.
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


class Cells:
    """What intervals that overlap are cut into so that none is cut by an edge of another.

    Args:
        edges: where cells begin or end, in any order and as often as they come.
    """

    def __init__(self, edges: Iterable[int]) -> None:
        self.edges = sorted(set(edges))

    def __len__(self) -> int:
        return max(0, len(self.edges) - 1)

    def __getitem__(self, number: int) -> Interval:
        return Interval(self.edges[number], self.edges[number + 1])

    def of(self, start: int, stop: int) -> range:
        """The numbers of the cells of an interval that begins and ends at edges."""
        return range(bisect_left(self.edges, start), bisect_left(self.edges, stop))


def cut(one: tuple[int, int], edges: Sequence[int]) -> Iterator[Interval]:
    """``one`` in pieces that end at ``edges`` (ascending) that lie within it."""
    start, stop = one
    for edge in edges[bisect_right(edges, start) :]:
        if edge >= stop:
            break
        if start < edge:
            yield Interval(start, edge)
            start = edge
    if start < stop:
        yield Interval(start, stop)


def ones(mask: int) -> Iterator[Interval]:
    """The bits of ``mask`` that are set, in runs."""
    at = 0
    while mask:
        skip = (mask & -mask).bit_length() - 1
        mask >>= skip
        length = (~mask & (mask + 1)).bit_length() - 1
        mask >>= length
        at += skip + length
        yield Interval(at - length, at)


def bits(start: int, stop: int) -> int:
    """The mask of an interval: the bits from ``start`` to ``stop`` set."""
    return ((1 << stop - start) - 1) << start
