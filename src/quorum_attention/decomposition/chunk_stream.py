"""Chunks of one side that stay on a device while blocks of the other side stream past.

Where memory holds few rows, tasks of a quorum read each row many times: a task of l
chunks reads all of them to compute l * l / 2 chunk pairs. Here a chunk of one side
stays, and the other side streams past it block after block, so a row that is read meets
every row that stays. That is the loop of FlashAttention, between host memory and a
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition.bands import Band, rectangles_of_band
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.rectangles import Rectangle


class _SideInParts(NamedTuple):
    """Queries or keys, in parts of equal size; the last part may be smaller."""

    n_rows: int
    part_rows: int

    @property
    def n_parts(self) -> int:
        return ceil_div(self.n_rows, self.part_rows)

    @property
    def n_full_parts(self) -> int:
        return self.n_rows // self.part_rows

    def part(self, number: int) -> Interval:
        start = number * self.part_rows
        return Interval(start, min(self.n_rows, start + self.part_rows))


@dataclass(frozen=True, slots=True)
class ChunkStream:
    """The pairs of one call, chunk by chunk of the side that stays.

    Attributes:
        resident_axis: the side whose chunks stay: of queries or of keys.
        n_queries, n_keys: of the call.
        queries, keys: rows of a part of queries, and of keys: a chunk of the side that
            stays, and a block of the other; the last may be smaller.
        is_causal: keep only keys at or before the query.
    """

    resident_axis: Literal["query", "key"]
    n_queries: int
    n_keys: int
    queries: int
    keys: int
    is_causal: bool

    @property
    def n_chunks(self) -> int:
        """How many chunks stay, one after the other."""
        return self._resident.n_parts

    @property
    def n_blocks(self) -> int:
        """How many blocks the other side has."""
        return self._streamed.n_parts

    @property
    def _resident(self) -> _SideInParts:
        return self._side(self.resident_axis == "query")

    @property
    def _streamed(self) -> _SideInParts:
        return self._side(self.resident_axis == "key")

    def _side(self, is_query: bool) -> _SideInParts:
        return (
            _SideInParts(self.n_queries, self.queries)
            if is_query
            else _SideInParts(self.n_keys, self.keys)
        )

    def chunk(self, number: int) -> Interval:
        """The rows of a chunk of the side that stays."""
        return self._resident.part(number)

    def block(self, number: int) -> Interval:
        """The rows of a block of the other side."""
        return self._streamed.part(number)

    def blocks(self, chunk: int) -> range:
        """The blocks that have pairs with a chunk."""
        start, stop = self.chunk(chunk)
        if not self.is_causal:
            return range(self.n_blocks)
        block_rows = self._streamed.part_rows
        if self.resident_axis == "query":
            n_reached = ceil_div(stop, block_rows)
            return range(min(self.n_blocks, n_reached))
        first = start // block_rows if start < self.n_queries else self.n_blocks
        return range(first, self.n_blocks)

    @property
    def n_units(self) -> int:
        """How many times a block streams past a chunk."""
        return sum(len(self.blocks(chunk)) for chunk in range(self.n_chunks))

    @property
    def fewest_units(self) -> int:
        """A lower bound of ``n_units``, found without looking at every chunk.

        From one chunk to the next there are only more blocks, or only fewer. So half of
        the chunks meet at least as many as the middle one.
        """
        middle = self.n_chunks // 2
        return middle * len(self.blocks(middle))

    def full_blocks(self, chunk: int) -> range:
        """The blocks of full size that keep all their pairs with a chunk."""
        start, stop = self.chunk(chunk)
        blocks = self.blocks(chunk)
        first = blocks.start
        end = min(blocks.stop, self._streamed.n_full_parts)
        block_rows = self._streamed.part_rows
        if self.is_causal and self.resident_axis == "query":
            end = min(end, (start + 1) // block_rows)
        elif self.is_causal:
            first = max(first, ceil_div(stop - 1, block_rows))
        return range(first, max(first, end))

    def last_chunk(self, block: int) -> int:
        """The last chunk that a block of queries has pairs with, where keys stay. (The
        first is chunk 0.)"""
        if not self.is_causal:
            return self.n_chunks - 1
        last_query = self.block(block).stop - 1
        return min(self.n_chunks - 1, last_query // self.keys)

    def rectangles(self, chunk: int, block: int) -> tuple[Rectangle, ...]:
        """The pairs of a chunk and a block, in positions within them; causal ones are
        squares."""
        queries = self.chunk(chunk)
        keys = self.block(block)
        if self.resident_axis == "key":
            queries, keys = keys, queries
        band = Band(high=queries.start - keys.start if self.is_causal else None)
        local_queries = Interval(0, queries.length)
        local_keys = Interval(0, keys.length)
        return tuple(rectangles_of_band(band, local_queries, local_keys))
