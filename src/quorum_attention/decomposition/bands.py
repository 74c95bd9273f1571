r"""A band of pairs along the diagonal, and the plain and causal rectangles that it consists of.

Causal masks of any offset and sliding windows keep ``low <= key - query <= high``. Within a block
of queries and keys that is a few plain rectangles and, along each edge, squares cut by a diagonal:

    queries   keys ->
      |    [ \       \       ]      a lower triangle is a causal square;
      v    [   \  1    \     ]      an upper triangle is one with both orders turned round;
           [     \       \   ]      between them a full rectangle (1).

So kernels that know only plain and causal calls run it, and compute hardly a pair in vain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.pairs import EMPTY, FULL, PARTIAL, Ranges, Verdict
from quorum_attention.decomposition.rectangles import Block, Rectangle

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
class Part(Block):
    """A block of pairs, and which of them are kept.

    Attributes:
        kind: "plain": all; "lower", "upper": of a square, the triangle of that name with its
            diagonal; "band": those of a band; "ragged": each has to be tested.
    """

    kind: Kind = "plain"


@dataclass(frozen=True, slots=True)
class Band:
    """The pairs with ``low <= key - query <= high``; None is no bound on that side."""

    low: int | None = None
    high: int | None = None

    def __and__(self, other: Band) -> Band:
        """Pairs that both keep."""
        lows = [b.low for b in (self, other) if b.low is not None]
        highs = [b.high for b in (self, other) if b.high is not None]
        return Band(max(lows, default=None), min(highs, default=None))

    def moved(self, by: int) -> Band:
        """The band with ``by`` added to both bounds."""
        return Band(*(None if bound is None else bound + by for bound in (self.low, self.high)))

    @property
    def keeps_all(self) -> bool:
        """Whether there is no bound."""
        return self.low is None and self.high is None

    @property
    def width(self) -> int | None:
        """The most queries and the most keys of a part, None where there is no limit."""
        if self.low is None or self.high is None:
            return None
        return max(self.high - self.low + 1, _RAGGED_ROWS + _NARROW)

    @property
    def _bounds(self) -> tuple[int, int]:
        """``low`` and ``high``, beyond all positions where there is no bound."""
        return (
            -_FAR if self.low is None else self.low,
            _FAR if self.high is None else self.high,
        )

    def verdict(self, block: Ranges) -> Verdict:
        """The verdict on a block of positions."""
        (q0, q1), (k0, k1) = block
        low, high = self._bounds
        least, most = k0 - (q1 - 1), k1 - 1 - q0
        if least > high or most < low or low > high:
            return EMPTY
        return FULL if low <= least and most <= high else PARTIAL

    def count(self, q0: int, q1: int, k0: int, k1: int) -> int:
        """How many pairs of a block it keeps."""
        low, high = self._bounds
        if q0 >= q1 or k0 >= k1 or low > high:
            return 0
        return _upto(q0, q1, k0, k1, high) - _upto(q0, q1, k0, k1, low - 1)

    def within(self, q0: int, q1: int, k0: int, k1: int) -> Part | None:
        """The least part of the block [q0, q1) x [k0, k1) with all of its kept pairs, if any."""
        low, high = self._bounds
        if low > high:
            return None
        before = None
        while before != (q0, q1, k0, k1):
            before = q0, q1, k0, k1
            q0, k1 = max(q0, k0 - high), min(k1, q1 + high)
            q1, k0 = min(q1, k1 - low), max(k0, q0 + low)
            if q0 >= q1 or k0 >= k1:
                return None
        whole = self.verdict(Ranges.of(q0, q1, k0, k1)) is FULL
        return Part(q0, q1, k0, k1, "plain" if whole else "band")

    def parts(self, q0: int, q1: int, k0: int, k1: int) -> Iterator[Part]:
        """Parts, none a band, that hold each kept pair of the block exactly once."""
        least, (low, high) = self.within(q0, q1, k0, k1), self._bounds
        if least is None:
            return
        # Every row and every column of it has a kept pair.
        q0, q1, k0, k1 = least.query_start, least.query_stop, least.key_start, least.key_stop
        beyond, short = k1 - 1 - q0 > high, k0 - (q1 - 1) < low
        if beyond and short:
            yield from self._both_edges(least, low, high)
            return
        parts = [Part(q0, q1, k0, k1)]
        if beyond:
            first, corner = q0 + high, k1 - high  # the key on the first query's diagonal
            square = Part(q0, corner, first, k1, "lower")
            parts = [Part(q0, q1, k0, first), Part(corner, q1, first, k1), square]
        elif short:
            last, corner = q1 + low, k0 - low  # the end of the keys up to the last query's diagonal
            square = Part(corner, q1, k0, last, "upper")
            parts = [Part(q0, q1, last, k1), Part(q0, corner, k0, last), square]
        yield from (part for part in parts if part.n_queries > 0 and part.n_keys > 0)

    def _both_edges(self, least: Part, low: int, high: int) -> Iterator[Part]:
        q0, q1, k0, k1 = least.query_start, least.query_stop, least.key_start, least.key_stop
        width = high - low
        if width < _NARROW:
            for a in range(q0, q1, _RAGGED_ROWS):
                b = min(a + _RAGGED_ROWS, q1)
                yield Part(a, b, max(k0, a + low), min(k1, b + high), "ragged")
            return
        # Squares of this side meet in each block of queries; what is between them is full.
        side = width // _TILE * _TILE or width
        for a in range(q0, q1, side):
            b = min(a + side, q1)
            for first, last in ((a + low, b + low), (b + low, a + high), (a + high, b + high)):
                yield from self.parts(a, b, max(k0, first), min(k1, last))


def rectangles_of_band(band: Band, queries: Interval, keys: Interval) -> Iterator[Rectangle]:
    """Yield rectangles of the pairs of a band with one edge; causal ones are squares."""
    for part in band.parts(*queries, *keys):
        is_causal = part.kind == "lower"
        yield Rectangle(
            part.query_start, part.query_stop, part.key_start, part.key_stop, causal=is_causal
        )


def _upto(q0: int, q1: int, k0: int, k1: int, most: int) -> int:
    """How many pairs of a block have ``key - query <= most``."""
    width = k1 - k0

    def below(x: int) -> int:
        # The sum of min(t, width) for t from 1 to x.
        if x <= 0:
            return 0
        return x * (x + 1) // 2 if x <= width else width * (width + 1) // 2 + (x - width) * width

    first = q0 + most + 1 - k0  # keys of the first query
    return below(q1 - 1 - q0 + first) - below(first - 1)
