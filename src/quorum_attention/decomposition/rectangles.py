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
from operator import attrgetter, itemgetter

from quorum_attention.decomposition.intervals import joined, ones

# Kernels work on tiles of this many tokens; rectangles are cut at multiples of it where possible.
_TILE = 128


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
    diagonal = [
        Rectangle(starts[i], starts[i + 1], starts[i], starts[i + 1], causal=is_causal)
        for i, b in enumerate(bits)
        if b == 0
    ]
    if is_causal:
        return [*_joined(_halved(starts, _kept(bits, below=True))), *diagonal]
    # Two ways: with the diagonal apart, and with it among the other pairs. The shorter list wins.
    apart = _kept(bits, below=False)
    together = [row | (1 << i if bits[i] == 0 else 0) for i, row in enumerate(apart)]
    # The diagonal is joined along keys only. Joining along queries too would save one call in
    # twenty, but make more rectangle sizes, and vendor kernels take long to prepare each new size.
    first = _along([*_joined(_halved(starts, apart)), *diagonal], keys=True)
    second = _along(_halved(starts, together), keys=True)
    return min(first, second, key=len)


def _kept(bits: Sequence[int], *, below: bool) -> list[int]:
    """For every span, bit j is set if it keeps its pairs with span j (never with itself).

    ``below``: only spans before it count.
    """
    n = len(bits)
    return [
        sum(1 << j for j in range(i if below else n) if j != i and own & bits[j] == 0)
        for i, own in enumerate(bits)
    ]


def _halved(starts: Sequence[int], rows: list[int]) -> list[Rectangle]:
    """Plain rectangles of the pairs of spans in ``rows`` (see ``_kept``), by halving the queries.

    Keys that most queries keep come first.
    """

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
            middle = _middle(starts, low, high)
            yield from halve(low, middle, some)
            yield from halve(middle, high, some)

    return list(halve(0, len(rows), (1 << len(rows)) - 1)) if rows else []


def _middle(starts: Sequence[int], low: int, high: int) -> int:
    """The span boundary nearest to the middle token of spans [low, high)."""
    centre = starts[low] + starts[high]
    return min(range(low + 1, high), key=lambda i: abs(2 * starts[i] - centre))


def _joined(rectangles: list[Rectangle]) -> list[Rectangle]:
    """Joins plain rectangles wherever two that touch make up a larger one.

    Joining along keys first or along queries first gives different lists; the shorter is taken.
    """
    return min((_joined_from(rectangles, keys) for keys in (True, False)), key=len)


def _joined_from(rectangles: list[Rectangle], keys: bool) -> list[Rectangle]:
    """Joins along keys and along queries in turn until nothing more can be joined.

    ``keys``: along keys first.
    """
    while True:
        before = len(rectangles)
        rectangles = _along(_along(rectangles, keys), not keys)
        if len(rectangles) == before:
            return rectangles


def _along(rectangles: list[Rectangle], keys: bool) -> list[Rectangle]:
    """Joins rectangles with the same queries and touching keys; with ``keys`` false, those with the
    same keys and touching queries.

    Each result takes the place of its first part, so large calls stay ahead of small ones.
    """
    by, continued = (_BY_QUERIES, _beside) if keys else (_BY_KEYS, _beneath)

    def placed(one: _Placed, after: _Placed) -> _Placed | None:
        both = continued(one[1], after[1])
        return None if both is None else (min(one[0], after[0]), both)

    order = sorted(enumerate(rectangles), key=lambda each: by(each[1]))
    return [r for _, r in sorted(joined(order, placed), key=itemgetter(0))]


_Placed = tuple[int, Rectangle]
"""A rectangle, and its place in the list that is joined."""
_BY_QUERIES = attrgetter("query_start", "query_stop", "key_start")
_BY_KEYS = attrgetter("key_start", "key_stop", "query_start")


def _beside(a: Rectangle, b: Rectangle) -> Rectangle | None:
    if a.key_stop != b.key_start or a.query_start != b.query_start or a.query_stop != b.query_stop:
        return None
    return Rectangle(a.query_start, a.query_stop, a.key_start, b.key_stop)


def _beneath(a: Rectangle, b: Rectangle) -> Rectangle | None:
    if a.query_stop != b.query_start or a.key_start != b.key_start or a.key_stop != b.key_stop:
        return None
    return Rectangle(a.query_start, b.query_stop, a.key_start, a.key_stop)


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
    a query or a key, so one call can add all their results.
    """

    first: Rectangle
    count: int = 1
    query_step: int = 0
    key_step: int = 0

    def rectangles(self) -> list[Rectangle]:
        """The rectangles, in order."""
        r = self.first
        n, m = r.n_queries, r.n_keys
        corners = (
            (r.query_start + i * self.query_step, r.key_start + i * self.key_step)
            for i in range(self.count)
        )
        return [Rectangle(q, q + n, k, k + m, r.causal) for q, k in corners]


@lru_cache(maxsize=256)
def batches(rectangles: tuple[Rectangle, ...]) -> tuple[Batch, ...]:
    """``rectangles`` as batches, found greedily: the longest possible batch each time.

    Batches are ordered by the place of their first rectangle in ``rectangles``. Results are cached,
    because many tasks of one level have the same rectangles.
    """
    shapes: dict[tuple[int, int, bool], list[Rectangle]] = {}
    for r in rectangles:
        shapes.setdefault((r.n_queries, r.n_keys, r.causal), []).append(r)
    found: list[Batch] = []
    for alike in shapes.values():
        left = sorted(alike, key=lambda r: (r.query_start, r.key_start))
        while left:
            batch = _longest(left)
            found.append(batch)
            taken = set(batch.rectangles())
            left = [r for r in left if r not in taken]
    place = {r: number for number, r in enumerate(rectangles)}
    return tuple(sorted(found, key=lambda batch: place[batch.first]))


def _longest(alike: list[Rectangle]) -> Batch:
    """The longest batch that begins with the first of ``alike`` (one size, in order)."""
    first, *others = alike
    there = {(r.query_start, r.key_start) for r in others}
    best = Batch(first)
    for second in others:
        query_step = second.query_start - first.query_start
        key_step = second.key_start - first.key_start
        if query_step < first.n_queries or key_step < first.n_keys:
            continue
        count = 2
        while (
            first.query_start + count * query_step,
            first.key_start + count * key_step,
        ) in there:
            count += 1
        if count > best.count:
            best = Batch(first, count, query_step, key_step)
    return best
