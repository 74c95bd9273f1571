"""Other ways than tasks through the pairs of a call: rectangles of all of them, and passages.

All tasks of a level together keep every pair once. Where nothing has to be brought anywhere, the
pairs need not be taken task by task. Halving gives the fewest and largest rectangles; rows or
blocks of chunks give rectangles that are no larger than memory allows:

    halves [C      ]   rows [C      ]   blocks [C      ]
           [1 C    ]        [1 C    ]          [1 C    ]
           [2 2 C  ]        [2 2 C  ]          [2 3 C  ]
           [2 2 3 C]        [3 3 3 C]          [4 5 6 C]

Where memory holds few rows, tasks of a quorum read each row many times: a task of l chunks reads
all of them to compute l * l / 2 chunk pairs. In a passage a chunk of one side stays, and the other
side passes by it block after block, so a row that is read meets every row that stays. That is the
loop of FlashAttention, between host memory and a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from quorum_attention.decomposition.bands import Band
from quorum_attention.decomposition.decomposition import Decomposition, Task
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.rectangles import Rectangle, cut

Pieces = Literal["halves", "rows", "blocks"]
"""How the pairs of a sequence are laid out in rectangles: by halving it at chunks; a chunk of
queries against all their keys; a chunk of queries against a chunk of keys."""


@lru_cache(maxsize=256)
def pieces_of(
    shape: Decomposition, pieces: Pieces, is_causal: bool, n_queries: int, n_keys: int
) -> tuple[Task, tuple[Rectangle, ...]]:
    """The whole sequence as one task, and rectangles of it that hold every pair of a call once.

    Without levels that is one rectangle; with levels it is cut at the chunks of the first.
    """
    task = shape.whole()
    if pieces == "halves" or not shape.depth:
        return task, task.rectangles(is_causal, n_queries, n_keys)
    band, keys = Band(high=0 if is_causal else None), Interval(0, n_keys)
    rows = (Interval(span.start, min(span.stop, n_queries)) for span in task.spans)
    found = (r for queries in rows for r in _within(band, queries, keys))
    if pieces == "blocks":
        return task, tuple(cut(found, shape.n_tokens, shape.chunk_tokens))
    return task, tuple(found)


@dataclass(frozen=True, slots=True)
class Passage:
    """The pairs of one call, chunk by chunk of the side that stays.

    Attributes:
        stays: the side whose chunks stay: of queries or of keys.
        n_queries, n_keys: of the call.
        queries, keys: rows of a chunk of the side that stays, and of a block of the other; the last
            may be smaller.
        is_causal: keep only keys at or before the query.
    """

    stays: Literal["query", "key"]
    n_queries: int
    n_keys: int
    queries: int
    keys: int
    is_causal: bool

    @property
    def n_chunks(self) -> int:
        """How many chunks stay, one after the other."""
        n, size = self._sides[0]
        return -(-n // size)

    @property
    def n_blocks(self) -> int:
        """How many blocks the other side has."""
        n, size = self._sides[1]
        return -(-n // size)

    @property
    def _sides(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(rows, rows of a part) of the side that stays, and of the other."""
        queries, keys = (self.n_queries, self.queries), (self.n_keys, self.keys)
        return (queries, keys) if self.stays == "query" else (keys, queries)

    def chunk(self, number: int) -> Interval:
        """The rows of a chunk of the side that stays."""
        return _part(number, *self._sides[0])

    def block(self, number: int) -> Interval:
        """The rows of a block of the other side."""
        return _part(number, *self._sides[1])

    def blocks(self, chunk: int) -> range:
        """The blocks that have pairs with a chunk."""
        start, stop = self.chunk(chunk)
        n, size = self._sides[1]
        if not self.is_causal:
            return range(self.n_blocks)
        if self.stays == "query":
            return range(min(self.n_blocks, -(-stop // size)))
        return range(start // size if start < n else self.n_blocks, self.n_blocks)

    @property
    def n_units(self) -> int:
        """How many times a block passes by a chunk."""
        return sum(len(self.blocks(chunk)) for chunk in range(self.n_chunks))

    def plain_blocks(self, chunk: int) -> range:
        """Of the blocks that have pairs with a chunk, those of full size of which it keeps all."""
        every, (start, stop) = self.blocks(chunk), self.chunk(chunk)
        n, size = self._sides[1]
        low, high = every.start, min(every.stop, n // size)
        if self.is_causal and self.stays == "query":
            high = min(high, (start + 1) // size)
        elif self.is_causal:
            low = max(low, -(-(stop - 1) // size))
        return range(low, max(low, high))

    def last_chunk(self, block: int) -> int:
        """The last chunk that a block of queries has pairs with, where keys stay. (The first is
        chunk 0.)"""
        if not self.is_causal:
            return self.n_chunks - 1
        return min(self.n_chunks - 1, (self.block(block).stop - 1) // self.keys)

    def rectangles(self, chunk: int, block: int) -> tuple[Rectangle, ...]:
        """The pairs of a chunk and a block, in positions within them; causal ones are squares."""
        queries, keys = self.chunk(chunk), self.block(block)
        if self.stays == "key":
            queries, keys = keys, queries
        band = Band(high=queries.start - keys.start if self.is_causal else None)
        return tuple(_within(band, Interval(0, queries.length), Interval(0, keys.length)))


def _part(number: int, n: int, size: int) -> Interval:
    return Interval(number * size, min(n, (number + 1) * size))


def _within(band: Band, queries: Interval, keys: Interval) -> Iterator[Rectangle]:
    """The pairs of some queries and some keys in a band with one edge; causal ones are squares."""
    for part in band.parts(*queries, *keys):
        bounds = (part.query_start, part.query_stop, part.key_start, part.key_stop)
        yield Rectangle(*bounds, part.kind == "lower")
