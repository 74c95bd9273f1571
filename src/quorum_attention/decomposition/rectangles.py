"""Cover the kept pairs of a task with few, large rectangles.

A pair of spans is kept when their group bits are disjoint. Where everything off the
diagonal is kept (depth 1), the lower triangle splits by halving:

    queries          keys ->        the upper half of the queries against the
      |     [C             ]        lower half of the keys is one plain call,
      v     [1  C          ]        then each half again; owned diagonals are
            [2  2  C       ]        causal squares (C).
            [2  2  3  C    ]

At deeper levels each step takes the keys that all queries of its part keep, and halves
the queries for the other keys. So cuts happen only where the mask forces them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from quorum_attention.arithmetic import even_part, round_up
from quorum_attention.decomposition.intervals import joined, ones

# Kernels work on tiles of this many tokens; rectangles are cut at multiples of it where
# possible.
_TILE = 128
# Batches of one size that a rectangle may continue.
_OPEN = 32


@dataclass(frozen=True, slots=True)
class PairBlock:
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
class Rectangle(PairBlock):
    """A plain attention call inside a task, in task-local token positions.

    ``causal`` rectangles are squares on the diagonal (query_start == key_start). Their
    lower triangle is kept, with the diagonal.
    """

    causal: bool = False

    @property
    def pairs(self) -> int:
        """The number of kept pairs of query and key."""
        if self.causal:
            return self.n_queries * (self.n_queries + 1) // 2
        return self.n_queries * self.n_keys


def cover(
    starts: Sequence[int], bits: Sequence[int], is_causal: bool
) -> list[Rectangle]:
    """Rectangles that hold each kept pair of a task exactly once.

    Args:
        starts: local start of every span, and the end of the last one.
        bits: group bits of every span.
        is_causal: keep only pairs with key position <= query position.
    """
    if not bits:
        return []
    if not is_causal and not any(bits):
        return [_square(starts[0], starts[-1])]
    keys_by_span = _keys_by_span(bits, is_causal)
    plain = _halved(starts, keys_by_span)
    plain = _joined(plain, along_keys=True)
    plain = _joined(plain, along_keys=False)
    diagonal: list[Rectangle] = []
    for span, span_bits in enumerate(bits):
        if span_bits == 0:
            square = _square(
                starts[span],
                starts[span + 1],
                is_causal,
            )
            diagonal.append(square)
    if is_causal:
        return [*plain, *diagonal]
    # The diagonal is joined along keys only. Joining along queries too would save one
    # call in twenty, but make more rectangle sizes, and vendor kernels take long to
    # prepare each new size.
    return _joined([*plain, *diagonal], along_keys=True)


def _square(start: int, stop: int, is_causal: bool = False) -> Rectangle:
    """The pairs of some tokens with each other."""
    return Rectangle(start, stop, start, stop, is_causal)


def _keys_by_span(bits: Sequence[int], is_causal: bool) -> list[int]:
    """For every span of queries, bit j is set if it keeps its pairs with span j (never
    itself)."""
    keys_by_span: list[int] = []
    for query, query_bits in enumerate(bits):
        n_spans = query if is_causal else len(bits)
        keys = 0
        for key in range(n_spans):
            if key != query and not query_bits & bits[key]:
                keys |= 1 << key
        keys_by_span.append(keys)
    return keys_by_span


def _halved(starts: Sequence[int], keys_by_span: list[int]) -> list[Rectangle]:
    """Plain rectangles of the pairs in ``keys_by_span``, by halving the queries."""

    def halve(low: int, high: int, keys: int) -> Iterator[Rectangle]:
        # The query spans [low, high) all keep some of ``keys``; other keys only some of
        # them keep.
        common = keys
        in_any = 0
        for row in keys_by_span[low:high]:
            common &= row
            in_any |= row
        start = starts[low]
        stop = starts[high]
        for first, last in ones(common):
            yield Rectangle(start, stop, starts[first], starts[last])
        remaining = keys & in_any & ~common
        if not remaining:
            return
        # Cut at the span boundary nearest to the middle.
        boundaries = range(low + 1, high)
        middle = min(boundaries, key=lambda i: abs(2 * starts[i] - start - stop))
        yield from halve(low, middle, remaining)
        yield from halve(middle, high, remaining)

    n_spans = len(keys_by_span)
    return list(halve(0, n_spans, (1 << n_spans) - 1))


def _joined(rectangles: list[Rectangle], *, along_keys: bool) -> list[Rectangle]:
    """Join plain rectangles with the same queries and touching keys, or the other way
    round. Large ones come first."""

    def sides(r: Rectangle) -> tuple[tuple[int, int], tuple[int, int]]:
        queries = (r.query_start, r.query_stop)
        keys = (r.key_start, r.key_stop)
        return (queries, keys) if along_keys else (keys, queries)

    def continued(r: Rectangle, after: Rectangle) -> Rectangle | None:
        side, (_, stop) = sides(r)
        side_after, (start_after, _) = sides(after)
        if side != side_after or stop != start_after:
            return None
        return Rectangle(
            r.query_start,
            after.query_stop,
            r.key_start,
            after.key_stop,
        )

    ordered = sorted(rectangles, key=sides)
    return sorted(
        joined(ordered, continued),
        key=lambda r: -r.n_queries * r.n_keys,
    )


def clip(
    rectangles: Iterable[Rectangle], n_queries: int, n_keys: int
) -> Iterator[Rectangle]:
    """The parts of ``rectangles`` within the first ``n_queries`` rows and ``n_keys``
    columns.

    Causal parts stay square; queries left over below a square become a plain rectangle.
    """
    for r in rectangles:
        query_stop = min(r.query_stop, n_queries)
        key_stop = min(r.key_stop, n_keys)
        if query_stop <= r.query_start or key_stop <= r.key_start:
            continue
        if not r.causal:
            yield replace(r, query_stop=query_stop, key_stop=key_stop)
            continue
        corner = min(query_stop, key_stop)
        yield replace(r, query_stop=corner, key_stop=corner)
        if query_stop > corner:
            yield Rectangle(corner, query_stop, r.key_start, corner)


def cut(
    rectangles: Iterable[Rectangle], max_queries: int, max_keys: int
) -> Iterator[Rectangle]:
    """``rectangles`` cut so that none has more queries or keys than the limits.

    A causal square becomes smaller causal squares and plain rectangles.
    """
    for r in rectangles:
        if r.causal:
            yield from _cut_square(r, max_queries, max_keys)
        else:
            yield from _cut_plain(r, max_queries, max_keys)


def _cut_plain(r: Rectangle, max_queries: int, max_keys: int) -> Iterator[Rectangle]:
    height = _even_part(r.n_queries, max_queries)
    width = _even_part(r.n_keys, max_keys)
    for query_start in range(r.query_start, r.query_stop, height):
        query_stop = min(query_start + height, r.query_stop)
        for key_start in range(r.key_start, r.key_stop, width):
            key_stop = min(key_start + width, r.key_stop)
            yield Rectangle(
                query_start,
                query_stop,
                key_start,
                key_stop,
            )


def _even_part(n: int, limit: int) -> int:
    """The size of (nearly) equal parts of ``n``, at most ``limit``.

    Equal parts mean few sizes for kernels to prepare, and no thin rest. If ``limit`` is
    a multiple of the tile, so is the result.
    """
    unit = _TILE if limit % _TILE == 0 else 1
    return round_up(even_part(n, limit), unit)


def _cut_square(r: Rectangle, max_queries: int, max_keys: int) -> Iterator[Rectangle]:
    side = min(max_queries, max_keys)
    if r.n_queries <= side:
        yield r
        return
    for start in range(r.query_start, r.query_stop, side):
        stop = min(start + side, r.query_stop)
        yield _square(start, stop, is_causal=True)
        if stop < r.query_stop:
            below = Rectangle(stop, r.query_stop, start, stop)
            yield from _cut_plain(below, max_queries, max_keys)


@dataclass(frozen=True, slots=True)
class Batch:
    """``count`` rectangles: number i is ``first`` moved by i steps along both axes.

    Halving a task's triangle gives one large rectangle, then two of half the size, then
    four: most are too small to fill a GPU with one call each. Those of one size lie at
    equal distances along the diagonal, so a strided view makes them batch entries of a
    single call. No two of them share a query; nor a key, unless all of them have the
    same.
    """

    first: Rectangle
    count: int = 1
    query_step: int = 0
    key_step: int = 0

    @property
    def pairs(self) -> int:
        """Query-key pairs of all its rectangles."""
        return self.count * self.first.pairs

    @property
    def n_queries(self) -> int:
        """Query rows of all its rectangles."""
        return self.count * self.first.n_queries

    def rectangle(self, number: int) -> Rectangle:
        """One of them."""
        first = self.first
        down = number * self.query_step
        along = number * self.key_step
        return Rectangle(
            first.query_start + down,
            first.query_stop + down,
            first.key_start + along,
            first.key_stop + along,
            first.causal,
        )

    def continued(self, after: Rectangle) -> Batch | None:
        """The batch with ``after``, of the same size, as its next rectangle; None if it
        is not."""
        down = after.query_start - self.first.query_start
        along = after.key_start - self.first.key_start
        if self.count == 1:
            is_apart = down >= after.n_queries and along >= after.n_keys
            if is_apart:
                return Batch(self.first, 2, down, along)
            return None
        next_down = self.count * self.query_step
        next_along = self.count * self.key_step
        if down != next_down or along != next_along:
            return None
        return replace(self, count=self.count + 1)


@lru_cache(maxsize=256)
def batches(rectangles: tuple[Rectangle, ...]) -> tuple[Batch, ...]:
    """``rectangles`` as batches, each by the first of the last few that it continues.

    Batches are ordered by the place of their first rectangle in ``rectangles``. Results
    are cached, because many tasks of one level have the same rectangles.
    """
    by_shape: dict[tuple[int, int, bool], list[Rectangle]] = defaultdict(list)
    for r in rectangles:
        by_shape[r.n_queries, r.n_keys, r.causal].append(r)
    all_batches: list[Batch] = []
    for same_shape in by_shape.values():
        same_shape.sort(key=lambda r: (r.query_start, r.key_start))
        same_batches: list[Batch] = []
        for r in same_shape:
            _add_rectangle(same_batches, r)
        all_batches += same_batches
    places = {r: place for place, r in enumerate(rectangles)}
    all_batches.sort(key=lambda batch: places[batch.first])
    return tuple(all_batches)


def _add_rectangle(batches: list[Batch], r: Rectangle) -> None:
    """Add a rectangle to the first of the last batches that it continues, or begin a
    batch."""
    for number in range(max(0, len(batches) - _OPEN), len(batches)):
        longer = batches[number].continued(r)
        if longer is not None:
            batches[number] = longer
            return
    batches.append(Batch(r))
