"""Which rank computes which pairs of a sharded call, and which rows it needs for that. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from quorum_attention.decomposition.intervals import Interval, covered, cut, union, within, without


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sizes of a sharded call.

    Attributes:
        starts: rank r holds the tokens [starts[r], starts[r + 1]); the last entry is the number of
            tokens of the whole sequence.
        heads, kv_heads: query heads and key/value heads; the second divides the first.
        units: what may be given to a rank by itself: "pairs" of any kind; "rows" with all their
            keys (under a mask: nothing is merged then); "heads" (with dropout, whose pairs are
            numbered by head).
    """

    starts: tuple[int, ...]
    heads: int
    kv_heads: int
    is_causal: bool
    units: Literal["pairs", "rows", "heads"] = "pairs"

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        """Tokens of the whole sequence."""
        return self.starts[-1]

    @property
    def share(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.kv_heads

    @property
    def pairs(self) -> int:
        """Pairs of all heads."""
        return self.heads * self.pairs_of(0, self.tokens)

    def pairs_of(self, start: int, stop: int) -> int:
        """Pairs of the rows [start, stop) of one head."""
        if not self.is_causal:
            return (stop - start) * self.tokens
        return (stop * (stop + 1) - start * (start + 1)) // 2

    def kv_of(self, heads: tuple[int, int]) -> Interval:
        """The key/value heads that query heads read."""
        return Interval(heads[0] // self.share, -(-heads[1] // self.share))

    def blocks(self, heads: Interval, rows: tuple[int, int]) -> Iterator[Block]:
        """The blocks of whole rows."""
        low, high = rows
        if low >= high or not heads.length:
            return
        mine = Interval(low, high)
        if self.units != "pairs":
            yield Block(heads, mine, (Interval(0, self.tokens),), below=self.is_causal)
            return
        if not self.is_causal:
            yield Block(heads, mine, (Interval(0, self.tokens),))
            return
        if low:
            yield Block(heads, mine, (Interval(0, low),))
        yield Block(heads, mine, (mine,), causal=True)


@dataclass(frozen=True, slots=True)
class Block:
    """A plain attention call: the rows of some query heads against some keys.

    Attributes:
        heads: query heads.
        queries: positions.
        keys: positions, ascending and disjoint.
        causal: of the square ``keys == (queries,)`` the lower triangle, diagonal included, is kept.
        below: a mask keeps keys up to the query's position.
    """

    heads: Interval
    queries: Interval
    keys: tuple[Interval, ...]
    causal: bool = False
    below: bool = False

    @property
    def pairs(self) -> int:
        """Kept pairs of all its heads."""
        n, low = self.queries.length, self.queries.start if self.below else 0
        one = n * sum(k.length for k in self.keys)
        if self.causal or self.below:
            one = n * (n + 1) // 2 + n * low
        return self.heads.length * one


class Needed(NamedTuple):
    """Rows that a rank needs in a stage: for its blocks' queries, or for their keys."""

    heads: Interval
    rows: tuple[Interval, ...]


class Piece(NamedTuple):
    """Rows of some heads that one rank owns and one rank computes with.

    Attributes:
        rank: computes.
        stage: of that rank.
        owner: holds the rows in its shard; may be ``rank`` itself.
        heads, rows: query heads or key/value heads; positions.
        alone: no other rank computes with them, so what comes back needs no adding up.
    """

    rank: int
    stage: int
    owner: int
    heads: Interval
    rows: Interval
    alone: bool

    @property
    def vectors(self) -> int:
        """Rows of all its heads."""
        return self.heads.length * self.rows.length


Stages = tuple[tuple[Block, ...], ...]


@dataclass(frozen=True)
class Assignment:
    """Every pair of a call, once, on some rank.

    Attributes:
        way: how the ranks' shares were made, in words.
        of: the call's sizes.
        shares: by rank and stage, blocks. Stages of a rank have no key/value head in common; two
            blocks anywhere have the same query heads, or none in common.
        whole_heads: rank r has all pairs of the r-th of equal shares of the heads and of the
            key/value heads.
        local_first: each rank begins with its own triangle (``local_first.py``).
    """

    way: str
    of: Sequences
    shares: tuple[Stages, ...]
    whole_heads: bool = False
    local_first: bool = False

    @cached_property
    def n_stages(self) -> int:
        """Stages of the rank that has most of them."""
        return max((len(stages) for stages in self.shares), default=0)

    @cached_property
    def most_calls(self) -> int:
        """Attention calls of the rank that makes most of them: one, where heads are whole."""
        if self.whole_heads:
            return 1
        return max(sum(len(blocks) for blocks in stages) for stages in self.shares)

    def pairs(self, rank: int) -> int:
        """Pairs that a rank computes."""
        return sum(block.pairs for blocks in self.shares[rank] for block in blocks)

    @property
    def imbalance(self) -> float:
        """Pairs of the rank with most of them, over an equal share; 1 is perfect."""
        most = max(self.pairs(rank) for rank in range(self.of.ranks))
        return most * self.of.ranks / self.of.pairs if self.of.pairs else 1.0

    def queries(self, rank: int, stage: int) -> list[Needed]:
        """The rows of queries that a rank needs in a stage, by their heads."""
        by_heads: dict[Interval, list[Interval]] = defaultdict(list)
        for block in self.blocks(rank, stage):
            by_heads[block.heads].append(block.queries)
        return [Needed(heads, tuple(union(rows))) for heads, rows in sorted(by_heads.items())]

    def keys(self, rank: int, stage: int) -> Needed:
        """The rows of keys and values that a rank needs in a stage."""
        blocks = self.blocks(rank, stage)
        heads = [self.of.kv_of(block.heads) for block in blocks]
        low = min((h.start for h in heads), default=0)
        high = max((h.stop for h in heads), default=0)
        return Needed(Interval(low, high), tuple(union(k for b in blocks for k in b.keys)))

    def blocks(self, rank: int, stage: int) -> tuple[Block, ...]:
        """What a rank computes in a stage; nothing after its last."""
        stages = self.shares[rank]
        return stages[stage] if stage < len(stages) else ()

    @cached_property
    def query_pieces(self) -> tuple[Piece, ...]:
        """What moves of queries; outputs and their gradients move the same way or back."""
        return self._pieces(
            (rank, stage, needed)
            for rank, stages in enumerate(self.shares)
            for stage in range(len(stages))
            for needed in self.queries(rank, stage)
        )

    @cached_property
    def key_pieces(self) -> tuple[Piece, ...]:
        """What moves of keys, and of values; their gradients move back."""
        return self._pieces(
            (rank, stage, self.keys(rank, stage))
            for rank, stages in enumerate(self.shares)
            for stage in range(len(stages))
        )

    def query_alone(self, rank: int, stage: int, heads: Interval) -> bool:
        """Whether no other rank computes with the rows of these heads that this one needs."""
        return (rank, stage, heads) not in self._shared[0]

    def alone(self, rank: int, stage: int) -> bool:
        """Whether no other rank computes with any row that this one needs."""
        return not any((rank, stage) == one[:2] for shared in self._shared for one in shared)

    @cached_property
    def _shared(self) -> tuple[frozenset[tuple[int, int, Interval]], ...]:
        return tuple(
            frozenset((p.rank, p.stage, p.heads) for p in pieces if not p.alone)
            for pieces in (self.query_pieces, self.key_pieces)
        )

    def _pieces(self, wanted: Iterator[tuple[int, int, Needed]]) -> tuple[Piece, ...]:
        listed = list(wanted)
        by_heads: dict[Interval, list[Interval]] = defaultdict(list)
        for _, _, needed in listed:
            by_heads[needed.heads].extend(needed.rows)
        several = {heads: covered(rows, 2) for heads, rows in by_heads.items()}
        found = []
        for rank, stage, needed in listed:
            shared = several[needed.heads]
            for rows in needed.rows:
                parts = [(part, False) for part in within(rows, shared)]
                parts += [(part, True) for part in without([rows], shared)]
                for part, alone in sorted(parts):
                    for piece in cut(part, self.of.starts):
                        owner = _holder(self.of.starts, piece.start)
                        found.append(Piece(rank, stage, owner, needed.heads, piece, alone))
        return tuple(found)

    def received(self, rank: int, sizes: RowBytes) -> int:
        """Bytes that a rank receives in one pass."""
        total = 0
        for pieces, row in ((self.query_pieces, sizes.query), (self.key_pieces, sizes.key)):
            for piece in pieces:
                if piece.rank == piece.owner:
                    continue
                if piece.rank == rank:
                    total += piece.vectors * row.inward
                elif piece.owner == rank:
                    total += piece.vectors * (row.alone if piece.alone else row.partial)
        return total

    def most_received(self, sizes: RowBytes) -> int:
        """Bytes that the rank receives that receives most."""
        return max(self.received(rank, sizes) for rank in range(self.of.ranks))


class Moved(NamedTuple):
    """Bytes of one row of one head: to who computes with it, and of what comes back.

    Attributes:
        inward: of the inputs.
        alone: of the results, where one rank computes all of them.
        partial: of the results, where they have to be added up.
    """

    inward: int
    alone: int
    partial: int


class RowBytes(NamedTuple):
    """Bytes that move with a row of queries, and with a row of keys and values."""

    query: Moved
    key: Moved


def forward_bytes(head_dim: int, value_dim: int, element: int, state: int) -> RowBytes:
    """Bytes of rows in a forward: queries out, output and lse back; keys and values out."""
    lse = state
    back = Moved(head_dim * element, value_dim * element + lse, value_dim * state + lse)
    return RowBytes(back, Moved((head_dim + value_dim) * element, 0, 0))


def backward_bytes(head_dim: int, value_dim: int, element: int, state: int, kept: bool) -> RowBytes:
    """Bytes of rows in a backward.

    Args:
        kept: the inputs were kept where they were computed with; else they move again, with the
            output and the lse.
    """
    again = head_dim * element + value_dim * element + state
    queries = value_dim * element + (0 if kept else again)
    both = head_dim + value_dim
    return RowBytes(
        Moved(queries, head_dim * element, head_dim * state),
        Moved(0 if kept else both * element, both * element, both * state),
    )


def _holder(starts: Sequence[int], row: int) -> int:
    """The rank that holds a row."""
    for rank, (low, high) in enumerate(pairwise(starts)):
        if low <= row < high:
            return rank
    raise ValueError(f"row {row} is in no shard of {tuple(starts)}")


__all__ = [
    "Assignment",
    "Block",
    "Moved",
    "Needed",
    "Piece",
    "RowBytes",
    "Sequences",
    "Stages",
    "backward_bytes",
    "forward_bytes",
]
