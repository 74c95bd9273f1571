"""Kept pairs as polygons over (key, query) positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quorum_attention.decomposition import EMPTY, PARTIAL, Decomposition, Pairs, Ranges, Task
from quorum_attention.decomposition.pairs import quarters, walk
from quorum_attention.decomposition.rectangles import Rectangle

Point = tuple[float, float]


def corners(block: Rectangle) -> list[Point]:
    """The corners of a kept block; x is the key, y the query."""
    top: list[Point] = [(block.key_start, block.query_start)]
    if not block.causal:
        top.append((block.key_stop, block.query_start))
    return [*top, (block.key_stop, block.query_stop), (block.key_start, block.query_stop)]


def blocks(task: Task, pairs: Pairs, cell: int = 1) -> Iterator[Rectangle]:
    """The kept pairs of ``task``, in positions of the whole call: its rectangles, cut where its
    tokens have gaps, under the mask as ``kept`` draws it."""
    for r in task.rectangles(pairs.is_causal, pairs.n_queries, pairs.n_keys):
        for queries, keys, causal in task.contiguous(r):
            part = Rectangle(queries.start, queries.stop, keys.start, keys.stop, causal)
            yield from kept(part, pairs, cell)


def kept(block: Rectangle, pairs: Pairs, cell: int) -> Iterator[Rectangle]:
    """What the mask of ``pairs`` keeps of ``block``: at its edges squares of ``cell`` tokens, each
    drawn if the pair in its middle is kept, or if the mask cannot tell."""
    if pairs.verdict is None:
        yield block
        return
    whole = Ranges.of(block.query_start, block.query_stop, block.key_start, block.key_stop)
    for part, found in walk(whole, pairs.of, lambda r: quarters(r, cell)):
        if found is PARTIAL:
            row, column = (sum(side) // 2 for side in part)
            found = pairs.of(Ranges.of(row, row + 1, column, column + 1))
        if found is not EMPTY:
            yield Rectangle(*part.queries, *part.keys)


def shallow(decomposition: Decomposition, limit: int, is_causal: bool) -> Decomposition:
    """``decomposition`` with as many of its levels as can be drawn in about ``limit`` blocks.

    Deeper levels only divide the blocks of the first ones further.
    """
    while decomposition.depth > 1:
        last = decomposition.task(tuple(c - 1 for c in decomposition.levels))
        first = decomposition.task((0,) * decomposition.depth)
        pairs = Pairs(decomposition.n_tokens, decomposition.n_tokens, is_causal)
        each = max(sum(1 for _ in blocks(t, pairs)) for t in (first, last))
        if each * decomposition.n_tasks <= limit:
            break
        decomposition = replace(decomposition, levels=decomposition.levels[:-1])
    return decomposition
