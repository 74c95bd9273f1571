"""The tile census: how many score tiles are masked, clear or mixed (paper, Appendix A.2).

A tile is *clear* if its rows and its columns have no group bit in common, *masked* if one bit is in
all of its rows and all of its columns, else *mixed*. Two numbers for the rows and two for the
columns decide it: the bitwise OR and the bitwise AND of their group bits. Under a mask a tile has
to be kept by the mask as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from quorum_attention.counts import whole_number
from quorum_attention.decomposition.pairs import (
    EMPTY,
    FULL,
    PARTIAL,
    Pairs,
    Ranges,
    Verdict,
    quarters,
    walk,
)
from quorum_attention.decomposition.tasks import Task

_Line = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Census:
    """Counts of score tiles, and their shares (fractions of one)."""

    masked_tiles: int
    clear_tiles: int
    mixed_tiles: int

    @property
    def tiles(self) -> int:
        """All tiles counted."""
        return self.masked_tiles + self.clear_tiles + self.mixed_tiles

    @property
    def masked(self) -> float:
        """Share of tiles in which no pair is kept."""
        return self.masked_tiles / max(1, self.tiles)

    @property
    def clear(self) -> float:
        """Share of tiles in which every pair is kept."""
        return self.clear_tiles / max(1, self.tiles)

    @property
    def mixed(self) -> float:
        """Share of tiles whose pairs have to be tested one by one."""
        return self.mixed_tiles / max(1, self.tiles)


def census(tasks: Iterable[Task], pairs: Pairs, tile: int = 128) -> Census:
    """Counts the tiles of all ``tasks`` together.

    Args:
        pairs: which pairs the call keeps; if causal, only tiles on or below the diagonal are
            counted, and one on the diagonal is told by its other rules.
        tile: tokens along each side of a tile.

    Raises:
        ValueError: ``tile`` is no whole number from 1.
    """
    tile = whole_number(tile, "tile", 1)
    counts: Counter[Verdict] = Counter()
    for task in tasks:
        counts += _tiles_of(task, pairs, tile)
    return Census(counts[EMPTY], counts[FULL], counts[PARTIAL])


def _tiles_of(task: Task, pairs: Pairs, tile: int) -> Counter[Verdict]:
    """The verdicts of a task's tiles by group bits and mask; blocks of tiles that the mask keeps
    or leaves out as a whole are counted at once."""
    counts: Counter[Verdict] = Counter()
    kept = replace(pairs, is_causal=False).of
    lines = [_line(task, at, at + tile) for at in range(0, task.n_tokens, tile)]

    def verdict(block: Ranges) -> Verdict:
        (r0, r1), (c0, c1) = block
        if pairs.is_causal and c0 >= r1:
            return EMPTY
        if pairs.is_causal and c1 - 1 > r0:
            return PARTIAL
        rows, columns = (
            task.segments(start * tile, min(stop * tile, task.n_tokens)) for start, stop in block
        )
        return kept(Ranges.of(rows[0].start, rows[-1].stop, columns[0].start, columns[-1].stop))

    n = len(lines)
    for ((r0, r1), (c0, c1)), found in walk(Ranges.of(0, n, 0, n), verdict, quarters) if n else ():
        if pairs.is_causal and c0 >= r1:
            continue  # above the diagonal
        if found is FULL:
            counts += _by_bits(lines[r0:r1], lines[c0:c1])
        elif found is EMPTY:
            counts[EMPTY] += (r1 - r0) * (c1 - c0)
        else:
            counts[_exactly(task, r0 * tile, c0 * tile, kept, tile)] += 1
    return counts


def _by_bits(rows: list[_Line], columns: list[_Line]) -> Counter[Verdict]:
    """The verdicts of tiles by their group bits; equal lines are counted at once."""
    counts: Counter[Verdict] = Counter()
    for (some, every), n_rows in Counter(rows).items():
        for (other_some, other_every), n_columns in Counter(columns).items():
            clear = some & other_some == 0
            found = FULL if clear else EMPTY if every & other_every else PARTIAL
            counts[found] += n_rows * n_columns
    return counts


def _exactly(
    task: Task, row: int, column: int, kept: Callable[[Ranges], Verdict], tile: int
) -> Verdict:
    """The verdict of one tile, by the runs of tokens with the same group bits in it."""
    found = {
        EMPTY if a.bits & b.bits else kept(Ranges.of(a.start, a.stop, b.start, b.stop))
        for a in task.between(row, row + tile)
        for b in task.between(column, column + tile)
    }
    return found.pop() if len(found) == 1 else PARTIAL


def _line(task: Task, start: int, stop: int) -> _Line:
    """(OR, AND) of the group bits of the task's tokens [start, stop)."""
    some, every = 0, -1
    for span in task.between(start, stop):
        some |= span.bits
        every &= span.bits
    return some, every
