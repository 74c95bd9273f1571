"""Kept pairs as polygons over (key, query) positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quorum_attention.decomposition import EMPTY, PARTIAL, Decomposition, Pairs, Ranges, Task
from quorum_attention.decomposition.pairs import quarters, walk

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Block:
    """A kept block in global positions; with ``causal`` only its lower triangle."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    causal: bool

    def corners(self) -> list[Point]:
        """The corners of its polygon; x is the key, y the query."""
        points: list[Point] = [
            (self.key_start, self.query_start),
            (self.key_stop, self.query_stop),
            (self.key_start, self.query_stop),
        ]
        if not self.causal:
            points.insert(1, (self.key_stop, self.query_start))
        return points


def blocks(task: Task, pairs: Pairs, cell: int = 1) -> Iterator[Block]:
    """The kept pairs of ``task``: its rectangles, cut where its tokens have gaps, under the mask as
    ``kept`` draws it."""
    for r in task.rectangles(pairs.is_causal, pairs.n_queries, pairs.n_keys):
        for queries, keys, causal in task.contiguous(r):
            yield from kept(
                Block(queries.start, queries.stop, keys.start, keys.stop, causal), pairs, cell
            )


def kept(block: Block, pairs: Pairs, cell: int) -> Iterator[Block]:
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
            yield Block(*part.queries, *part.keys, False)


def shallow(shape: Decomposition, limit: int, is_causal: bool) -> Decomposition:
    """``shape`` with as many of its levels as can be drawn in about ``limit`` blocks.

    Deeper levels only divide the blocks of the first ones further.
    """
    while shape.depth > 1:
        last = shape.task(tuple(c - 1 for c in shape.levels))
        first = shape.task((0,) * shape.depth)
        pairs = Pairs(shape.n_tokens, shape.n_tokens, is_causal)
        each = max(sum(1 for _ in blocks(t, pairs)) for t in (first, last))
        if each * shape.n_tasks <= limit:
            break
        shape = replace(shape, levels=shape.levels[:-1])
    return shape


def chunk_edges(shape: Decomposition) -> list[int]:
    """Boundaries of the first level's chunks, including 0 and the number of tokens."""
    if not shape.levels:
        return [0, shape.n_tokens]
    top = replace(shape, levels=shape.levels[:1])
    stops = [0]
    for task in top.tasks():
        owned = [span.stop for span in task.spans if span.bits == 0]
        stops.append(owned[0] if owned else stops[-1])
    return stops
