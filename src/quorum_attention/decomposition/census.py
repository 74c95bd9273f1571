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

from quorum_attention.decomposition.pairs import Pairs, Ranges
from quorum_attention.decomposition.quadtree import quarters, walk
from quorum_attention.decomposition.tasks import Span, Task
from quorum_attention.decomposition.verdicts import EMPTY, FULL, PARTIAL, Verdict

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

    def _share(self, count: int) -> float:
        return count / self.tiles if self.tiles else 0.0

    @property
    def masked(self) -> float:
        """Share of tiles in which no pair is kept."""
        return self._share(self.masked_tiles)

    @property
    def clear(self) -> float:
        """Share of tiles in which every pair is kept."""
        return self._share(self.clear_tiles)

    @property
    def mixed(self) -> float:
        """Share of tiles whose pairs have to be tested one by one."""
        return self._share(self.mixed_tiles)


def census(tasks: Iterable[Task], pairs: Pairs, tile: int = 128) -> Census:
    """Counts the tiles of all ``tasks`` together.

    Args:
        pairs: which pairs the call keeps; if causal, only tiles on or below the diagonal are
            counted, and one on the diagonal is told by its other rules.
        tile: tokens along each side of a tile.

    Raises:
        ValueError: ``tile`` is no whole number from 1.
    """
    if not isinstance(tile, int) or isinstance(tile, bool) or tile < 1:
        raise ValueError(f"tile must be a whole number of tokens from 1, got {tile!r}")
    counts: Counter[Verdict] = Counter()
    for task in tasks:
        lines = _lines(task, tile)
        if pairs.every_token_meets:
            counts += _by_bits(lines, lines, below=pairs.is_causal)
        elif lines:
            counts += _by_mask(task, lines, pairs, tile)
    return Census(counts[EMPTY], counts[FULL], counts[PARTIAL])


def _by_bits(rows: list[_Line], columns: list[_Line], *, below: bool = False) -> Counter[Verdict]:
    """The verdicts of tiles by their group bits; ``below``: each row meets columns up to its own.

    Columns with the same (OR, AND) get the same verdict, so equal ones are counted at once.
    """
    counts: Counter[Verdict] = Counter()
    seen = Counter([] if below else columns)
    for some, every in rows:
        if below:
            seen[some, every] += 1
        for (other_some, other_every), count in seen.items():
            clear = some & other_some == 0
            counts[FULL if clear else EMPTY if every & other_every else PARTIAL] += count
    return counts


def _by_mask(task: Task, lines: list[_Line], pairs: Pairs, tile: int) -> Counter[Verdict]:
    """The verdicts of a task's tiles by group bits and mask; blocks of tiles that the mask keeps
    or leaves out as a whole are counted at once."""
    counts: Counter[Verdict] = Counter()
    kept = replace(pairs, is_causal=False).of

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

    def parts(block: Ranges, found: Verdict) -> list[Ranges]:
        return quarters(block) if found is PARTIAL else []

    n = len(lines)
    for ((r0, r1), (c0, c1)), found in walk(Ranges.of(0, n, 0, n), verdict, parts):
        if pairs.is_causal and c0 >= r1:
            continue  # above the diagonal
        if found is FULL:
            counts += _by_bits(lines[r0:r1], lines[c0:c1])
        elif found is EMPTY:
            counts[EMPTY] += (r1 - r0) * (c1 - c0)
        else:
            counts[_exactly(task, r0, c0, kept, tile)] += 1
    return counts


def _exactly(
    task: Task, row: int, column: int, kept: Callable[[Ranges], Verdict], tile: int
) -> Verdict:
    """The verdict of one tile, by the runs of tokens with the same group bits in it."""
    rows, columns = (_spans(task, at * tile, (at + 1) * tile) for at in (row, column))
    found = {
        EMPTY if a.bits & b.bits else kept(Ranges.of(a.start, a.stop, b.start, b.stop))
        for a in rows
        for b in columns
    }
    return found.pop() if len(found) == 1 else PARTIAL


def _spans(task: Task, start: int, stop: int) -> list[Span]:
    """The parts of the task's spans at the local positions [start, stop)."""
    return [
        Span(span.start + max(0, start - at), span.start + min(span.stop - span.start, stop - at),
             span.bits)
        for span, at in zip(task.spans, task.local_starts, strict=False)
        if at < stop and start < at + span.stop - span.start
    ]  # fmt: skip


def _lines(task: Task, tile: int) -> list[_Line]:
    """(OR, AND) of the group bits of each ``tile`` consecutive tokens of the task."""
    lines: list[_Line] = []
    starts = task.local_starts
    index = 0
    for start in range(0, task.n_tokens, tile):
        stop = min(start + tile, task.n_tokens)
        while starts[index + 1] <= start:
            index += 1
        some, every = 0, -1
        at = index
        while at < len(task.spans) and starts[at] < stop:
            some |= task.spans[at].bits
            every &= task.spans[at].bits
            at += 1
        lines.append((some, every))
    return lines
