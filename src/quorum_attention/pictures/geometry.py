"""Kept pairs as polygons over (key, query) positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.decomposition.intervals import cut

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

    def centre(self) -> Point:
        """The centre of its polygon."""
        width, height = self.key_stop - self.key_start, self.query_stop - self.query_start
        if self.causal:
            return self.key_start + width / 3, self.query_start + height * 2 / 3
        return self.key_start + width / 2, self.query_start + height / 2


def blocks(
    task: Task, is_causal: bool, n_queries: int | None = None, n_keys: int | None = None
) -> Iterator[Block]:
    """The kept pairs of ``task``: its rectangles, cut where its tokens have gaps."""
    for r in task.rectangles(is_causal, n_queries, n_keys):
        for queries, keys, causal in task.contiguous(r):
            yield Block(queries.start, queries.stop, keys.start, keys.stop, causal)


def shallow(shape: Decomposition, limit: int, is_causal: bool) -> Decomposition:
    """``shape`` with as many of its levels as can be drawn in about ``limit`` blocks.

    Deeper levels only divide the blocks of the first ones further.
    """
    while shape.depth > 1:
        last = shape.task(tuple(c - 1 for c in shape.levels))
        first = shape.task((0,) * shape.depth)
        each = max(sum(1 for _ in blocks(t, is_causal)) for t in (first, last))
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


def split(block: Block, edges: list[int]) -> Iterator[Block]:
    """A plain block cut along ``edges``, in queries and in keys."""
    if block.causal:
        yield block
        return
    for queries in cut((block.query_start, block.query_stop), edges):
        for keys in cut((block.key_start, block.key_stop), edges):
            yield Block(*queries, *keys, False)
