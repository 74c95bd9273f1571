"""Kept pairs as polygons over (key, query) positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quorum_attention.decomposition import (
    EMPTY,
    PARTIAL,
    Decomposition,
    Pairs,
    Ranges,
    Task,
)
from quorum_attention.decomposition.pairs import quarters, walk
from quorum_attention.decomposition.rectangles import Rectangle

Point = tuple[float, float]
MAX_BLOCKS = 20_000
"""About the most blocks that a picture has."""


def corners(block: Rectangle) -> list[Point]:
    """The corners of a kept block; x is the key, y the query."""
    first_key = block.key_start
    top = block.query_start
    bottom = block.query_stop
    points: list[Point] = [(first_key, top)]
    if not block.causal:
        points.append((block.key_stop, top))
    return [*points, (block.key_stop, bottom), (first_key, bottom)]


def blocks(task: Task, pairs: Pairs, cell: int = 1) -> Iterator[Rectangle]:
    """The kept pairs of ``task``, in positions of the whole call.

    The task's rectangles are cut where its tokens have gaps. ``kept_blocks`` draws the
    mask.
    """
    rectangles = task.rectangles(pairs.is_causal, pairs.n_queries, pairs.n_keys)
    for rectangle in rectangles:
        for queries, keys, causal in task.contiguous(rectangle):
            part = Rectangle(
                queries.start,
                queries.stop,
                keys.start,
                keys.stop,
                causal,
            )
            yield from kept_blocks(part, pairs, cell)


def kept_blocks(block: Rectangle, pairs: Pairs, cell: int) -> Iterator[Rectangle]:
    """The parts of ``block`` that the mask of ``pairs`` keeps.

    Its edges are drawn in squares of ``cell`` tokens, each if the pair in its middle is
    kept, or if the mask cannot tell.
    """
    if pairs.verdict is None:
        yield block
        return
    ranges = Ranges.from_bounds(
        block.query_start, block.query_stop, block.key_start, block.key_stop
    )
    for part, verdict in walk(ranges, pairs.verdict_of, lambda r: quarters(r, cell)):
        if verdict is PARTIAL:
            row = sum(part.queries) // 2
            column = sum(part.keys) // 2
            verdict = pairs.verdict_of(
                Ranges.from_bounds(
                    row,
                    row + 1,
                    column,
                    column + 1,
                )
            )
        if verdict is not EMPTY:
            yield Rectangle(*part.queries, *part.keys)


def with_fewer_levels(decomposition: Decomposition, is_causal: bool) -> Decomposition:
    """``decomposition`` with as many of its levels as can be drawn in about
    ``MAX_BLOCKS`` blocks.

    Deeper levels only divide the blocks of the first ones further.
    """
    n_tokens = decomposition.n_tokens
    pairs = Pairs(n_tokens, n_tokens, is_causal)
    while decomposition.depth > 1:
        first_path = (0,) * decomposition.depth
        last_path = tuple(n_chunks - 1 for n_chunks in decomposition.levels)
        n_blocks = 0
        for path in (first_path, last_path):
            task = decomposition.task(path)
            n_blocks_of_task = sum(1 for _ in blocks(task, pairs))
            n_blocks = max(n_blocks, n_blocks_of_task)
        if n_blocks * decomposition.n_tasks <= MAX_BLOCKS:
            break
        decomposition = replace(decomposition, levels=decomposition.levels[:-1])
    return decomposition
