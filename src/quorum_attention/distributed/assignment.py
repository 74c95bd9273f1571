"""Which rank computes which pairs of a sharded call, in which stage, and which rows
move for that.

Nothing here imports torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from quorum_attention.decomposition.intervals import (
    Interval,
    counted,
    covered_twice,
    cut,
    union,
    within,
)
from quorum_attention.distributed.sharded_shape import ShardedShape

# Gathered rows are kept for the backward where they take at most this much of what
# shards take.
_MAX_KEPT_SHARE = 1.25


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """A plain attention call: the rows of some query heads against some keys.

    Attributes:
        heads: query heads.
        queries: positions.
        keys: positions, ascending and disjoint.
        causal: keys up to the query's position are kept; all of them, or those of a
            square.
    """

    heads: Interval
    queries: Interval
    keys: tuple[Interval, ...]
    causal: bool = False


class Operand(IntEnum):
    """The tensors that rows belong to: those of queries, or those of keys and
    values."""

    QUERY = 0
    KV = 1


class HeadSlice(NamedTuple):
    """Some heads of an operand: query heads, or key/value heads."""

    operand: Operand
    heads: Interval


class RowSlice(NamedTuple):
    """Rows of some heads that one rank owns and one rank computes with.

    Attributes:
        head_slice: the heads.
        rows: positions.
        rank: computes with the rows.
        stage: the stage of that rank.
        owner: holds the rows in its shard; may be ``rank`` itself.
        is_exclusive: no other rank computes with the rows, so what comes back is
            complete.
    """

    head_slice: HeadSlice
    rows: Interval
    rank: int
    stage: int
    owner: int
    is_exclusive: bool

    @property
    def operand(self) -> Operand:
        """The tensors that the rows belong to."""
        return self.head_slice.operand

    @property
    def heads(self) -> Interval:
        """The heads, numbered in the whole call."""
        return self.head_slice.heads

    @property
    def n_vectors(self) -> int:
        """The rows of all heads."""
        return self.heads.length * self.rows.length


class RowBytes(NamedTuple):
    """Bytes that move with one row of one head.

    Attributes:
        query: of inputs, to the rank that computes with them.
        key: of a key and its value.
        out: of results that come back complete.
        partial: of results that have to be added up.
        lse: of the log-sum-exp that comes with ``out``, unless inputs are kept where it
            is.
    """

    query: int
    key: int
    out: int
    partial: int
    lse: int = 0


Stages = tuple[tuple[ShardBlock, ...], ...]
"""The blocks of a rank, by stage."""

RowsNeeded = dict[HeadSlice, tuple[Interval, ...]]
"""The rows that a rank needs, ascending and disjoint: those of queries first."""


@dataclass(frozen=True)
class Assignment:
    """Every pair of a call, once, on some rank.

    Attributes:
        way: how the ranks' shares were made, in words.
        shape: the call's sizes.
        shares: blocks by rank and stage. Stages of a rank have no key/value head in
            common; two blocks anywhere have the same query heads, or none in common.
        whole_heads: rank r has all pairs of the r-th of equal shares of the heads and
            of the key/value heads.
    """

    way: str
    shape: ShardedShape
    shares: tuple[Stages, ...]
    whole_heads: bool = False

    @property
    def n_stages(self) -> int:
        """The stages of the rank that has most stages."""
        return max(map(len, self.shares))

    def n_pairs(self, rank: int) -> int:
        """Return how many pairs a rank computes."""
        return sum(
            self._pairs_of(block) for block in chain.from_iterable(self.shares[rank])
        )

    def _pairs_of(self, block: ShardBlock) -> int:
        """Return the kept pairs of all heads of a block."""
        rows = block.queries
        if self.shape.units != "pairs":
            # The rows have all their keys.
            pairs_of_head = self.shape.row_work.pairs(rows)
        elif block.causal:
            # The block is a square.
            pairs_of_head = rows.length * (rows.length + 1) // 2
        else:
            pairs_of_head = rows.length * counted(block.keys)
        return block.heads.length * pairs_of_head

    @property
    def imbalance(self) -> float:
        """The pairs of the rank with most pairs, over an equal share; 1 is perfect."""
        if not self.shape.n_pairs:
            return 1.0
        n_ranks = self.shape.n_ranks
        most_pairs = max(self.n_pairs(rank) for rank in range(n_ranks))
        return most_pairs * n_ranks / self.shape.n_pairs

    def blocks(self, rank: int, stage: int) -> tuple[ShardBlock, ...]:
        """Return the blocks of a rank in a stage; none after its last stage."""
        stages = self.shares[rank]
        return stages[stage] if stage < len(stages) else ()

    def rows_needed(self, rank: int, stage: int) -> RowsNeeded:
        """Return the rows that a rank needs in a stage.

        Keys have the same heads for all blocks of the stage.
        """
        return self._rows_by_place.get((rank, stage), {})

    @cached_property
    def _rows_by_place(self) -> dict[tuple[int, int], RowsNeeded]:
        """The rows that are needed, by rank and stage."""
        rows: dict[tuple[int, int], RowsNeeded] = {}
        for rank, stages in enumerate(self.shares):
            for stage, blocks in enumerate(stages):
                rows[rank, stage] = self._rows_of(blocks)
        return rows

    def _rows_of(self, blocks: Iterable[ShardBlock]) -> RowsNeeded:
        """Return the rows of all blocks of a stage."""
        needed: dict[HeadSlice, list[Interval]] = defaultdict(list)
        for block in blocks:
            queries = HeadSlice(Operand.QUERY, block.heads)
            needed[queries].append(block.queries)
            kv_heads = self.shape.kv_of(block.heads)
            keys = HeadSlice(Operand.KV, kv_heads)
            needed[keys] += block.keys
        merged: RowsNeeded = {}
        for head_slice in sorted(needed):
            rows = union(needed[head_slice])
            merged[head_slice] = tuple(rows)
        return merged

    @cached_property
    def row_slices(self) -> tuple[RowSlice, ...]:
        """The rows that move, as inputs. Outputs and gradients move the same way or
        back."""
        return tuple(self._cut_rows())

    def _cut_rows(self) -> Iterator[RowSlice]:
        """Cut the rows that ranks need where owners change, and where other ranks need
        them too."""
        starts = self.shape.starts
        requests: list[tuple[int, int, HeadSlice, tuple[Interval, ...]]] = []
        rows_of_heads: dict[HeadSlice, list[Interval]] = defaultdict(list)
        for (rank, stage), needed in self._rows_by_place.items():
            for head_slice, rows in needed.items():
                requests.append((rank, stage, head_slice, rows))
                rows_of_heads[head_slice] += rows
        for rank, stage, head_slice, rows in requests:
            shared_rows = covered_twice(rows_of_heads[head_slice])
            edges = sorted(chain(starts, *shared_rows))
            pieces = chain.from_iterable(cut(run, edges) for run in rows)
            for piece in pieces:
                owner = bisect_right(starts, piece.start) - 1
                is_shared = any(within(piece, shared_rows))
                yield RowSlice(
                    head_slice,
                    piece,
                    rank,
                    stage,
                    owner,
                    not is_shared,
                )

    @cached_property
    def keeps_inputs(self) -> bool:
        """Whether inputs stay where they were computed with until the backward.

        They do where rows are complete, and gathered rows take little more than the
        shards.
        """
        n_gathered = 0
        for part in self.row_slices:
            if part.operand == Operand.QUERY and not part.is_exclusive:
                return False
            n_gathered += part.n_vectors
        n_heads = self.shape.heads + self.shape.kv_heads
        n_sharded = self.shape.n_tokens * n_heads
        return n_gathered <= _MAX_KEPT_SHARE * n_sharded

    def slices_of(self, rank: int, stage: int) -> tuple[RowSlice, ...]:
        """Return the row slices of a stage that a rank sends or gets."""
        return tuple(self._slices_by_place[rank, stage])

    @cached_property
    def _slices_by_place(self) -> dict[tuple[int, int], list[RowSlice]]:
        """The row slices by the rank that sends or gets them, and by stage."""
        slices: dict[tuple[int, int], list[RowSlice]] = defaultdict(list)
        for part in self.row_slices:
            slices[part.rank, part.stage].append(part)
            if part.owner != part.rank:
                slices[part.owner, part.stage].append(part)
        return slices

    def most_received(self, row_bytes: RowBytes) -> int:
        """Return the bytes received in a forward by the rank that receives most."""
        received = Counter[int]()
        complete_bytes = row_bytes.out
        if not self.keeps_inputs:
            complete_bytes += row_bytes.lse
        for part in self.row_slices:
            if part.rank == part.owner:
                continue
            if part.operand == Operand.KV:
                received[part.rank] += part.n_vectors * row_bytes.key
                continue
            received[part.rank] += part.n_vectors * row_bytes.query
            out_bytes = complete_bytes if part.is_exclusive else row_bytes.partial
            received[part.owner] += part.n_vectors * out_bytes
        return max(received.values(), default=0)
