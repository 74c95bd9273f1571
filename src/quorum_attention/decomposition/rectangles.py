"""Cover the kept pairs of a task with few, large rectangles.

A pair of spans is kept when their group bits are disjoint. Where everything off the diagonal is
kept (depth 1), the lower triangle splits by halving:

    queries          keys ->        the upper half of the queries against the lower half of the
      |     [C             ]        keys is one plain call, then each half again; owned diagonals
      v     [1  C          ]        are causal squares (C).
            [2  2  C       ]
            [2  2  3  C    ]

At deeper levels each step takes the keys that all queries of its part keep, and halves the queries
for the other keys. So cuts happen only where the mask forces them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from quorum_attention.decomposition.intervals import joined, ones

# Kernels work on tiles of this many tokens; rectangles are cut at multiples of it where possible.
_TILE = 128
# Batches of one size that a rectangle may continue.
_OPEN = 32


@dataclass(frozen=True, slots=True)
class Block:
    """All pairs of some queries and some keys, by their positions."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int

    @property
    def n_queries(self) -> int:
        """Rows."""
        return self.query_stop - self.query_start

    @property
    def n_keys(self) -> int:
        """Columns."""
        return self.key_stop - self.key_start


@dataclass(frozen=True, slots=True)
class Rectangle(Block):
    """A plain attention call inside a task, in task-local token positions.

    ``causal`` rectangles are squares on the diagonal (query_start == key_start) of which the
    lower triangle, diagonal included, is kept.
    """

    causal: bool = False

    @property
    def pairs(self) -> int:
        """Kept query-key pairs."""
        if self.causal:
            return self.n_queries * (self.n_queries + 1) // 2
        return self.n_queries * self.n_keys


def cover(starts: Sequence[int], bits: Sequence[int], is_causal: bool) -> list[Rectangle]:
    """Rectangles that hold each kept pair of a task exactly once.

    Args:
        starts: local start of every span, and the end of the last one.
        bits: group bits of every span.
        is_causal: keep only pairs with key position <= query position.
    """
    if not is_causal and not any(bits):
        return [Rectangle(starts[0], starts[-1], starts[0], starts[-1])] if bits else []
    diagonal = [
        Rectangle(starts[i], starts[i + 1], starts[i], starts[i + 1], causal=is_causal)
        for i, b in enumerate(bits)
        if b == 0
    ]
    # For every span, bit j is set if it keeps its pairs with span j (never with itself).
    kept = [
        sum(1 << j for j in range(i if is_causal else len(bits)) if j != i and not b & bits[j])
        for i, b in enumerate(bits)
    ]
    found = [*_along(_along(_halved(starts, kept), keys=True), keys=False), *diagonal]
    # The diagonal is joined along keys only. Joining along queries too would save one call in
    # twenty, but make more rectangle sizes, and vendor kernels take long to prepare each new size.
    return found if is_causal else _along(found, keys=True)


def _halved(starts: Sequence[int], rows: list[int]) -> list[Rectangle]:
    """Plain rectangles of the pairs of spans in ``rows``, by halving the queries."""

    def halve(low: int, high: int, wanted: int) -> Iterator[Rectangle]:
        # Of the keys in ``wanted``: those that all query spans [low, high) keep, and those that
        # only some of them keep.
        every, some = wanted, 0
        for row in rows[low:high]:
            every &= row
            some |= row
        for first, last in ones(every):
            yield Rectangle(starts[low], starts[high], starts[first], starts[last])
        if some := wanted & some & ~every:
            centre = starts[low] + starts[high]  # cut at the span boundary nearest to the middle
            middle = min(range(low + 1, high), key=lambda i: abs(2 * starts[i] - centre))
            yield from halve(low, middle, some)
            yield from halve(middle, high, some)

    return list(halve(0, len(rows), (1 << len(rows)) - 1)) if rows else []


def _along(rectangles: list[Rectangle], *, keys: bool) -> list[Rectangle]:
    """Joins rectangles with the same queries and touching keys; with ``keys`` false, those with the
    same keys and touching queries. Large ones come first."""

    def sides(r: Rectangle) -> tuple[tuple[int, int], tuple[int, int]]:
        queries, over_keys = (r.query_start, r.query_stop), (r.key_start, r.key_stop)
        return (queries, over_keys) if keys else (over_keys, queries)

    def continued(one: Rectangle, after: Rectangle) -> Rectangle | None:
        (same, (start, stop)), (other, (next_start, next_stop)) = sides(one), sides(after)
        if same != other or stop != next_start:
            return None
        whole = (start, next_stop)
        return Rectangle(*same, *whole) if keys else Rectangle(*whole, *same)

    found = joined(sorted(rectangles, key=sides), continued)
    return sorted(found, key=lambda r: -r.n_queries * r.n_keys)


def clip(rectangles: Iterable[Rectangle], n_queries: int, n_keys: int) -> Iterator[Rectangle]:
    """The parts of ``rectangles`` within the first ``n_queries`` rows and ``n_keys`` columns.

    Causal parts stay square; queries left over below a square become a plain rectangle.
    """
    for r in rectangles:
        query_stop, key_stop = min(r.query_stop, n_queries), min(r.key_stop, n_keys)
        if query_stop <= r.query_start or key_stop <= r.key_start:
            continue
        if not r.causal:
            yield replace(r, query_stop=query_stop, key_stop=key_stop)
            continue
        corner = min(query_stop, key_stop)
        yield replace(r, query_stop=corner, key_stop=corner)
        if query_stop > corner:
            yield Rectangle(corner, query_stop, r.key_start, corner)


def cut(rectangles: Iterable[Rectangle], max_queries: int, max_keys: int) -> Iterator[Rectangle]:
    """``rectangles`` cut so that none has more queries or keys than the limits.

    A causal square becomes smaller causal squares and plain rectangles.
    """
    for r in rectangles:
        yield from (_cut_square if r.causal else _cut_plain)(r, max_queries, max_keys)


def _cut_plain(r: Rectangle, max_queries: int, max_keys: int) -> Iterator[Rectangle]:
    height, width = _even_part(r.n_queries, max_queries), _even_part(r.n_keys, max_keys)
    for q in range(r.query_start, r.query_stop, height):
        for k in range(r.key_start, r.key_stop, width):
            query_stop, key_stop = min(q + height, r.query_stop), min(k + width, r.key_stop)
            yield Rectangle(q, query_stop, k, key_stop)


def _even_part(n: int, limit: int) -> int:
    """The size of (nearly) equal parts of ``n``, at most ``limit``.

    Equal parts mean few sizes for kernels to prepare, and no thin rest. If ``limit`` is a multiple
    of the tile, so is the result.
    """
    part = -(-n // -(-n // limit))
    unit = _TILE if limit % _TILE == 0 else 1
    return -(-part // unit) * unit


def _cut_square(r: Rectangle, max_queries: int, max_keys: int) -> Iterator[Rectangle]:
    side = min(max_queries, max_keys)
    if r.n_queries <= side:
        yield r
        return
    for start in range(r.query_start, r.query_stop, side):
        stop = min(start + side, r.query_stop)
        yield Rectangle(start, stop, start, stop, causal=True)
        if stop < r.query_stop:
            yield from _cut_plain(Rectangle(stop, r.query_stop, start, stop), max_queries, max_keys)


@dataclass(frozen=True, slots=True)
class Batch:
    """``count`` rectangles: number i is ``first`` moved by i steps along both axes.

    Halving a task's triangle gives one large rectangle, then two of half the size, then four: most
    are too small to fill a GPU with one call each. Those of one size lie at equal distances along
    the diagonal, so a strided view makes them batch entries of a single call. No two of them share
    a query; nor a key, unless all of them have the same.
    """

    first: Rectangle
    count: int = 1
    query_step: int = 0
    key_step: int = 0

    def rectangle(self, number: int) -> Rectangle:
        """One of them."""
        q, k = number * self.query_step, number * self.key_step
        r = self.first
        bounds = (r.query_start + q, r.query_stop + q, r.key_start + k, r.key_stop + k)
        return Rectangle(*bounds, r.causal)

    def continued(self, after: Rectangle) -> Batch | None:
        """The batch with ``after``, of the same size, as its next rectangle; None if it is not."""
        down = after.query_start - self.first.query_start
        along = after.key_start - self.first.key_start
        if self.count == 1 and down >= after.n_queries and along >= after.n_keys:
            return Batch(self.first, 2, down, along)
        fits = (down, along) == (self.count * self.query_step, self.count * self.key_step)
        return replace(self, count=self.count + 1) if fits and self.count > 1 else None


@lru_cache(maxsize=256)
def batches(rectangles: tuple[Rectangle, ...]) -> tuple[Batch, ...]:
    """``rectangles`` as batches, each by the first of the last few that it continues.

    Batches are ordered by the place of their first rectangle in ``rectangles``. Results are cached,
    because many tasks of one level have the same rectangles.
    """
    shapes: dict[tuple[int, int, bool], list[Rectangle]] = {}
    for r in rectangles:
        shapes.setdefault((r.n_queries, r.n_keys, r.causal), []).append(r)
    found: list[Batch] = []
    for alike in shapes.values():
        begun = len(found)
        for r in sorted(alike, key=lambda r: (r.query_start, r.key_start)):
            for at in range(max(begun, len(found) - _OPEN), len(found)):
                longer = found[at].continued(r)
                if longer is not None:
                    found[at] = longer
                    break
            else:
                found.append(Batch(r))
    place = {r: number for number, r in enumerate(rectangles)}
    return tuple(sorted(found, key=lambda batch: place[batch.first]))
