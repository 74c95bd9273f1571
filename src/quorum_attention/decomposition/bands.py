r"""A band of pairs along the diagonal, and the plain and causal rectangles that it
consists of.

Causal masks of any offset and sliding windows keep ``low <= key - query <= high``.
Within a block of queries and keys that is a few plain rectangles and, along each edge,
squares cut by a diagonal:

    queries   keys ->
      |    [ \       \       ]      a lower triangle is a causal square;
      v    [   \  1    \     ]      an upper triangle is one with both orders
                                 turned round;
           [     \       \   ]      between them a full rectangle (1).

So kernels that know only plain and causal calls run it, and compute hardly a pair in
vain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.pairs import EMPTY, FULL, PARTIAL, Ranges, Verdict
from quorum_attention.decomposition.rectangles import PairBlock, Rectangle

Kind = Literal["plain", "lower", "upper", "band", "ragged"]

# A band narrower than this is run in ragged rectangles: its squares would be too small.
_NARROW = 64
# Queries of a ragged rectangle.
_RAGGED_ROWS = 128
# Farther than any two positions are apart.
_FAR = 1 << 70
# Sides of squares are multiples of it, where the band is as wide.
_TILE = 128


@dataclass(frozen=True, slots=True)
class BandPart(PairBlock):
    """A block of pairs, and which of them are kept.

    Attributes:
        kind: "plain": all; "lower", "upper": of a square, the triangle of that name
            with its diagonal; "band": those of a band; "ragged": each has to be tested.
    """

    kind: Kind = "plain"


@dataclass(frozen=True, slots=True)
class Band:
    """The pairs with ``low <= key - query <= high``; None is no bound on that side."""

    low: int | None = None
    high: int | None = None

    def __and__(self, band: Band) -> Band:
        """Pairs that both keep."""
        low = self.low
        if low is None or (band.low is not None and band.low > low):
            low = band.low
        high = self.high
        if high is None or (band.high is not None and band.high < high):
            high = band.high
        return Band(low, high)

    def moved(self, by: int) -> Band:
        """The band with ``by`` added to both bounds."""
        low = None if self.low is None else self.low + by
        high = None if self.high is None else self.high + by
        return Band(low, high)

    @property
    def keeps_all(self) -> bool:
        """Whether there is no bound."""
        return self.low is None and self.high is None

    @property
    def width(self) -> int | None:
        """The most queries and the most keys of a part, None where there is no
        limit."""
        if self.low is None or self.high is None:
            return None
        return max(self.high - self.low + 1, _RAGGED_ROWS + _NARROW)

    @property
    def _bounds(self) -> tuple[int, int]:
        """``low`` and ``high``, beyond all positions where there is no bound."""
        low = -_FAR if self.low is None else self.low
        high = _FAR if self.high is None else self.high
        return low, high

    def verdict(self, block: Ranges) -> Verdict:
        """The verdict on a block of positions."""
        queries, keys = block
        low, high = self._bounds
        # The distances key - query of the corners of the block.
        min_distance = keys.start - (queries.stop - 1)
        max_distance = keys.stop - 1 - queries.start
        if min_distance > high or max_distance < low or low > high:
            return EMPTY
        is_full = low <= min_distance and max_distance <= high
        return FULL if is_full else PARTIAL

    def count(self, q0: int, q1: int, k0: int, k1: int) -> int:
        """How many pairs of a block it keeps."""
        low, high = self._bounds
        if q0 >= q1 or k0 >= k1 or low > high:
            return 0
        n_up_to_high = _count_up_to(q0, q1, k0, k1, high)
        n_below_low = _count_up_to(
            q0,
            q1,
            k0,
            k1,
            low - 1,
        )
        return n_up_to_high - n_below_low

    def within(self, q0: int, q1: int, k0: int, k1: int) -> BandPart | None:
        """The least part of the block [q0, q1) x [k0, k1) with all of its kept pairs,
        if any."""
        low, high = self._bounds
        if low > high:
            return None
        # Each trim of one side may leave rows or columns of the other without a pair.
        before = None
        while before != (q0, q1, k0, k1):
            before = (q0, q1, k0, k1)
            q0 = max(q0, k0 - high)
            k1 = min(k1, q1 + high)
            q1 = min(q1, k1 - low)
            k0 = max(k0, q0 + low)
            if q0 >= q1 or k0 >= k1:
                return None
        is_full = self.verdict(Ranges.from_bounds(q0, q1, k0, k1)) is FULL
        return BandPart(
            q0,
            q1,
            k0,
            k1,
            "plain" if is_full else "band",
        )

    def parts(self, q0: int, q1: int, k0: int, k1: int) -> Iterator[BandPart]:
        """Parts, none a band, that hold each kept pair of the block exactly once."""
        # Every row and every column of the trimmed block has a kept pair.
        trimmed = self.within(q0, q1, k0, k1)
        if trimmed is None:
            return
        low, high = self._bounds
        crosses_high = trimmed.key_stop - 1 - trimmed.query_start > high
        crosses_low = trimmed.key_start - (trimmed.query_stop - 1) < low
        if crosses_high and crosses_low:
            parts = self._parts_of_both_edges(trimmed, low, high)
        elif crosses_high:
            parts = _parts_of_high_edge(trimmed, high)
        elif crosses_low:
            parts = _parts_of_low_edge(trimmed, low)
        else:
            parts = iter([replace(trimmed, kind="plain")])
        for part in parts:
            if part.n_queries > 0 and part.n_keys > 0:
                yield part

    def _parts_of_both_edges(
        self, block: BandPart, low: int, high: int
    ) -> Iterator[BandPart]:
        """Parts of a block that both edges cross, block of queries by block of
        queries."""
        width = high - low
        is_narrow = width < _NARROW
        # Squares of this side meet in each block of queries; between them all pairs are
        # kept.
        side = _RAGGED_ROWS if is_narrow else width // _TILE * _TILE or width
        for start in range(block.query_start, block.query_stop, side):
            stop = min(start + side, block.query_stop)
            if is_narrow:
                first_key = max(block.key_start, start + low)
                last_key = min(block.key_stop, stop + high)
                yield BandPart(start, stop, first_key, last_key, "ragged")
                continue
            edges = (
                start + low,
                stop + low,
                start + high,
                stop + high,
            )
            for first_key, last_key in pairwise(edges):
                k0 = max(block.key_start, first_key)
                k1 = min(block.key_stop, last_key)
                yield from self.parts(start, stop, k0, k1)


def rectangles_of_band(
    band: Band, queries: Interval, keys: Interval
) -> Iterator[Rectangle]:
    """Yield rectangles of the pairs of a band with one edge; causal ones are
    squares."""
    for part in band.parts(*queries, *keys):
        is_causal = part.kind == "lower"
        yield Rectangle(
            part.query_start,
            part.query_stop,
            part.key_start,
            part.key_stop,
            causal=is_causal,
        )


def _parts_of_high_edge(block: BandPart, high: int) -> Iterator[BandPart]:
    """Parts of a block of which the edge ``high`` cuts off the upper right corner."""
    q0 = block.query_start
    q1 = block.query_stop
    k0 = block.key_start
    k1 = block.key_stop
    # The last key of the first query, and the first query that has the last key.
    first_key = q0 + high
    corner = k1 - high
    yield BandPart(q0, q1, k0, first_key)
    yield BandPart(corner, q1, first_key, k1)
    yield BandPart(q0, corner, first_key, k1, "lower")


def _parts_of_low_edge(block: BandPart, low: int) -> Iterator[BandPart]:
    """Parts of a block of which the edge ``low`` cuts off the lower left corner."""
    q0 = block.query_start
    q1 = block.query_stop
    k0 = block.key_start
    k1 = block.key_stop
    # The end of the keys that the last query lacks, and the first query that lacks the
    # first key.
    last_key = q1 + low
    corner = k0 - low
    yield BandPart(q0, q1, last_key, k1)
    yield BandPart(q0, corner, k0, last_key)
    yield BandPart(corner, q1, k0, last_key, "upper")


def _count_up_to(q0: int, q1: int, k0: int, k1: int, high: int) -> int:
    """How many pairs of a block have ``key - query <= high``."""
    n_keys = k1 - k0
    keys_of_first = q0 + high + 1 - k0
    keys_of_last = keys_of_first + q1 - 1 - q0
    up_to_last = _sum_of_clipped(keys_of_last, n_keys)
    before_first = _sum_of_clipped(keys_of_first - 1, n_keys)
    return up_to_last - before_first


def _sum_of_clipped(n: int, limit: int) -> int:
    """The sum of ``min(i, limit)`` for i from 1 to ``n``."""
    if n <= 0:
        return 0
    if n <= limit:
        return n * (n + 1) // 2
    return limit * (limit + 1) // 2 + (n - limit) * limit
