"""The tile census: how many score tiles the mask resolves in constant time (Appendix A.2).

A tile is *clear* if no bit of its rows is in any of its columns, *masked* if some bit is in all
of its rows and all of its columns, else *mixed*. The verdict comes from the bitwise OR and AND of
the bits over the tile's rows and columns.
"""

from __future__ import annotations

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
        """Share of tiles of which nothing is kept."""
        return self._share(self.masked_tiles)

    @property
    def clear(self) -> float:
        """Share of tiles of which everything is kept."""
        return self._share(self.clear_tiles)

    @property
    def mixed(self) -> float:
        """Share of tiles that need a test for each element."""
        return self._share(self.mixed_tiles)


def census(tasks: Iterable[Task], is_causal: bool, tile: int = 128) -> Census:
    """Pooled over ``tasks``; with ``is_causal`` only tiles on or below the diagonal count."""
    if not isinstance(tile, int) or isinstance(tile, bool) or tile < 1:
        raise ValueError(f"tile must be a whole number of tokens from 1, got {tile!r}")
    masked = clear = mixed = 0
    for task in tasks:
        lines = _lines(task, tile)
        # Lines with the same summary get the same verdicts: count by kind, in order of place.
        seen: dict[tuple[int, int], int] = {} if is_causal else _kinds(lines)
        for some, every in lines:
            if is_causal:
                seen[some, every] = seen.get((some, every), 0) + 1
            for (other_some, other_every), count in seen.items():
                if some & other_some == 0:
                    clear += count
                elif every & other_every:
                    masked += count
                else:
                    mixed += count
    return Census(masked, clear, mixed)


def _kinds(lines: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    kinds: dict[tuple[int, int], int] = {}
    for line in lines:
        kinds[line] = kinds.get(line, 0) + 1
    return kinds


def _lines(task: Task, tile: int) -> list[tuple[int, int]]:
    """(OR, AND) of the bits of each run of ``tile`` local tokens."""
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
