"""The tile census: how many score tiles are masked, clear or mixed (paper, Appendix A.2).

A tile is *clear* if its rows and its columns have no group bit in common, *masked* if one bit is in
all of its rows and all of its columns, else *mixed*. Two numbers for the rows and two for the
columns decide it: the bitwise OR and the bitwise AND of their group bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from quorum_attention.decomposition.tasks import Task


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


def census(tasks: Iterable[Task], is_causal: bool, tile: int = 128) -> Census:
    """Counts the tiles of all ``tasks`` together.

    Args:
        is_causal: count only tiles on or below the diagonal.
        tile: tokens along each side of a tile.

    Raises:
        ValueError: ``tile`` is no whole number from 1.
    """
    if not isinstance(tile, int) or isinstance(tile, bool) or tile < 1:
        raise ValueError(f"tile must be a whole number of tokens from 1, got {tile!r}")
    masked = clear = mixed = 0
    for task in tasks:
        lines = _lines(task, tile)
        # Columns with the same (OR, AND) get the same verdict, so equal ones are counted at once.
        # A causal row of tiles meets only the columns up to its own.
        seen = Counter([] if is_causal else lines)
        for some, every in lines:
            if is_causal:
                seen[some, every] += 1
            for (other_some, other_every), count in seen.items():
                if some & other_some == 0:
                    clear += count
                elif every & other_every:
                    masked += count
                else:
                    mixed += count
    return Census(masked, clear, mixed)


def _lines(task: Task, tile: int) -> list[tuple[int, int]]:
    """(OR, AND) of the group bits of each ``tile`` consecutive tokens of the task."""
    lines: list[tuple[int, int]] = []
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
