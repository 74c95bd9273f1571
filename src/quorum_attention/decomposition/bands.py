r"""A band of pairs along the diagonal, and the plain and causal rectangles that it consists of.

Causal masks of any offset and sliding windows keep ``low <= key - query <= high``. Within a block
of queries and keys that is a few plain rectangles and, along each edge, squares cut by a diagonal:

    queries   keys ->
      |    [ \       \       ]      a lower triangle is a causal square;
      v    [   \  1    \     ]      an upper triangle is one with both orders turned round;
           [     \       \   ]      between them a clear rectangle (1).

So kernels that know only plain and causal calls run it, and compute hardly a pair in vain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quorum_attention.decomposition.pairs import Ranges
from quorum_attention.decomposition.verdicts import EMPTY, FULL, PARTIAL, Verdict

Kind = Literal["plain", "lower", "upper", "band", "ragged"]

# A band narrower than this is run in ragged rectangles: its squares would be too small.
_NARROW = 64
# Queries of a ragged rectangle.
_RAGGED_ROWS = 128
# Sides of squares are multiples of it, where the band is as wide.
_TILE = 128


@dataclass(frozen=True, slots=True)
class Part:
    """A block of pairs, and which of them are kept.

    Attributes:
        query_start, query_stop, key_start, key_stop: positions.
        kind: "plain": all; "lower", "upper": of a square, the triangle of that name with its
            diagonal; "band": those of a band; "ragged": each has to be tested.
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    kind: Kind = "plain"

    @property
    def n_queries(self) -> int:
        """Rows."""
        return self.query_stop - self.query_start

    @property
    def n_keys(self) -> int:
        """Columns."""
        return self.key_stop - self.key_start


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

    def verdict(self, block: Ranges) -> Verdict:
        """The verdict on a block of positions."""
        (q0, q1), (k0, k1) = block
        least, most = k0 - (q1 - 1), k1 - 1 - q0
        late = self.high is not None and least > self.high
        early = self.low is not None and most < self.low
        if late or early or self._is_empty:
            return EMPTY
        inside = (self.high is None or most <= self.high) and (
            self.low is None or least >= self.low
        )
        return FULL if inside else PARTIAL

    def count(self, q0: int, q1: int, k0: int, k1: int) -> int:
        """How many pairs of a block it keeps."""
        if q0 >= q1 or k0 >= k1 or self._is_empty:
            return 0
        most = (q1 - q0) * (k1 - k0)
        upto = most if self.high is None else _upto(q0, q1, k0, k1, self.high)
        return upto - (0 if self.low is None else _upto(q0, q1, k0, k1, self.low - 1))

    def within(self, q0: int, q1: int, k0: int, k1: int) -> Part | None:
        """The least part of the block [q0, q1) x [k0, k1) with all of its kept pairs, if any."""
        low, high = self.low, self.high
        if self._is_empty:
            return None
        before = None
        while before != (q0, q1, k0, k1):
            before = q0, q1, k0, k1
            if high is not None:
                q0, k1 = max(q0, k0 - high), min(k1, q1 + high)
            if low is not None:
                q1, k0 = min(q1, k1 - low), max(k0, q0 + low)
            if q0 >= q1 or k0 >= k1:
                return None
        whole = self.verdict(Ranges.of(q0, q1, k0, k1)) is FULL
        return Part(q0, q1, k0, k1, "plain" if whole else "band")

    def parts(self, q0: int, q1: int, k0: int, k1: int) -> Iterator[Part]:
        """Parts, none a band, that hold each kept pair of the block exactly once."""
        least, low, high = self.within(q0, q1, k0, k1), self.low, self.high
        if least is None:
            return
        q0, q1, k0, k1 = least.query_start, least.query_stop, least.key_start, least.key_stop
        beyond = high is not None and k1 - 1 - q0 > high
        short = low is not None and k0 - (q1 - 1) < low
        if beyond and short:
            yield from self._both_edges(q0, q1, k0, k1)
        elif beyond and high is not None:
            yield from _upper_edge(q0, q1, k0, k1, high)
        elif short and low is not None:
            yield from _lower_edge(q0, q1, k0, k1, low)
        else:
            yield Part(q0, q1, k0, k1)

    @property
    def _is_empty(self) -> bool:
        return self.low is not None and self.high is not None and self.low > self.high

    def _both_edges(self, q0: int, q1: int, k0: int, k1: int) -> Iterator[Part]:
        low, high = self.low, self.high
        if low is None or high is None:
            return
        width = high - low
        if width < _NARROW:
            for a in range(q0, q1, _RAGGED_ROWS):
                b = min(a + _RAGGED_ROWS, q1)
                yield Part(a, b, max(k0, a + low), min(k1, b + high), "ragged")
            return
        # Squares of this side meet in each block of queries; what is between them is clear.
        side = width // _TILE * _TILE or width
        for a in range(q0, q1, side):
            b = min(a + side, q1)
            for first, last in ((a + low, b + low), (b + low, a + high), (a + high, b + high)):
                yield from self.parts(a, b, max(k0, first), min(k1, last))


def _upper_edge(q0: int, q1: int, k0: int, k1: int, high: int) -> Iterator[Part]:
    """The parts of a block that only ``key - query <= high`` cuts; every row and every column has a
    kept pair."""
    first = q0 + high  # the key on the first query's diagonal
    corner = q0 + k1 - first
    if k0 < first:
        yield Part(q0, q1, k0, first)
    if corner < q1:
        yield Part(corner, q1, first, k1)
    yield Part(q0, corner, first, k1, "lower")


def _lower_edge(q0: int, q1: int, k0: int, k1: int, low: int) -> Iterator[Part]:
    """The same for ``key - query >= low``."""
    last = q1 + low  # the end of the keys up to the last query's diagonal
    corner = q1 - (last - k0)
    if last < k1:
        yield Part(q0, q1, last, k1)
    if q0 < corner:
        yield Part(q0, corner, k0, last)
    yield Part(corner, q1, k0, last, "upper")


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
