"""Rectangles of one size at regular distances: one kernel call with a batch dimension.

Halving a task's triangle gives one large rectangle, then two of half the size, then four. Most of
them are too small to fill a GPU with one call each. Those of one size lie at equal distances along
the diagonal, so a strided view makes them batch entries of a single call, which keeps a GPU as busy
as the large one does (docs/kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from quorum_attention.decomposition.rectangles import Rectangle


@dataclass(frozen=True, slots=True)
class Batch:
    """``count`` rectangles: number i is ``first`` moved by i steps along both axes.

    No two of them share a query or a key, so one call can add all their results.
    """

    first: Rectangle
    count: int = 1
    query_step: int = 0
    key_step: int = 0

    def rectangles(self) -> list[Rectangle]:
        """The rectangles, in order."""
        r = self.first
        return [
            Rectangle(
                r.query_start + i * self.query_step,
                r.query_stop + i * self.query_step,
                r.key_start + i * self.key_step,
                r.key_stop + i * self.key_step,
                r.causal,
            )
            for i in range(self.count)
        ]


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
