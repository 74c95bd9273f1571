"""Blocks of queries and keys that a mask keeps, each with a band of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Ranges, Verdict
from quorum_attention.decomposition.bands import Band

UNBOUNDED = 1 << 62
"""A position beyond all others. (Sums with positions are 64-bit integers.)"""
_ALL_PAIRS = Ranges.from_bounds(0, UNBOUNDED, 0, UNBOUNDED)


class Blocks:
    """Blocks of which no two overlap.

    Args:
        bounds: (n, 4): query_start, query_stop, key_start, key_stop, by ascending
            queries.
        bands: the pairs of each block lie in its band, too. Blocks of the same queries
            have the same band. None: all pairs of the blocks.

    Attributes:
        distinct_bands: each of the bands once.
    """

    def __init__(
        self, bounds: NDArray[np.int64], bands: Sequence[Band] | None = None
    ) -> None:
        self._bounds = bounds
        self._bands = [Band()] * len(bounds) if bands is None else bands
        distinct = dict.fromkeys(bands or [Band()])
        self.distinct_bands = tuple(distinct)

    def __len__(self) -> int:
        return len(self._bounds)

    @property
    def has_bands(self) -> bool:
        """Whether a block is cut by its band."""
        return self.distinct_bands != (Band(),)

    @property
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys of a block."""
        lengths = self._bounds[:, 1::2] - self._bounds[:, ::2]
        n_queries, n_keys = lengths.max(axis=0, initial=0).tolist()
        return n_queries, n_keys

    def within(self, block: Ranges, band: Band) -> Iterator[tuple[Ranges, Band]]:
        """The parts of ``block`` that lie in these blocks, each with its band within
        ``band``."""
        narrowed = cache(band.__and__)
        queries, keys = block
        numbers = self._numbers_of_meeting(block)
        parts = self._bounds[numbers]
        starts = parts[:, ::2]
        stops = parts[:, 1::2]
        np.maximum(
            starts,
            (queries.start, keys.start),
            out=starts,
        )
        np.minimum(
            stops,
            (queries.stop, keys.stop),
            out=stops,
        )
        for number, bounds in zip(numbers.tolist(), parts.tolist(), strict=True):
            part = Ranges.from_bounds(*bounds)
            yield part, narrowed(self._bands[number])

    def _numbers_of_meeting(self, block: Ranges) -> NDArray[np.int64]:
        """The numbers of the blocks that have a pair in common with ``block``."""
        queries, keys = block
        query_starts, query_stops, key_starts, key_stops = self._bounds.T
        # The blocks are sorted by their queries.
        first = int(np.searchsorted(query_stops, queries.start, side="right"))
        last = int(np.searchsorted(query_starts, queries.stop, side="left"))
        near = slice(first, last)
        begins_before = key_starts[near] < keys.stop
        ends_after = key_stops[near] > keys.start
        return first + np.flatnonzero(begins_before & ends_after)

    def verdict(self, block: Ranges) -> Verdict:
        """The verdict on a block of positions."""
        for part, band in self.within(block, Band()):
            verdict = band.verdict(part)
            if verdict is not EMPTY:
                return FULL if verdict is FULL and part == block else PARTIAL
        return EMPTY

    def __and__(self, blocks: Blocks) -> Blocks:
        """The common parts of two tables of blocks."""
        parts: list[tuple[Ranges, Band]] = []
        for block, band in self.within(_ALL_PAIRS, Band()):
            parts.extend(blocks.within(block, band))
        parts.sort(key=itemgetter(0))
        bounds = []
        bands = []
        for part, band in parts:
            bounds.append((*part.queries, *part.keys))
            bands.append(band)
        table = np.array(bounds, dtype=np.int64)
        return Blocks(table.reshape(-1, 4), bands)
