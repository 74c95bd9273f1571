"""Which rank computes which pairs of a sharded call, and which rows it needs for that. No torch.

Of three ways the one is taken that moves fewest bytes:

* *heads*: the rows of all heads in one line, head after head, are cut into shares of equal work.
  Where the heads divide by the ranks this is the exchange of heads of DeepSpeed-Ulysses; where they
  do not, the head at a cut is shared by rows.
* *keys*: a rank computes rows of its own, and keys and values come to it (as in ring attention).
  Under causal masking the last ranks have most work, and give rows to the first.
* *quorums*: a rank computes tasks of a cyclic quorum set, and so needs about sqrt(ranks) chunks
  instead of all; its partial results are merged where the rows belong.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise, product, repeat, starmap
from typing import Literal, NamedTuple

from quorum_attention.arithmetic import ceil_div, round_up
from quorum_attention.decomposition.bands import Band
from quorum_attention.decomposition.intervals import Interval, counted, covered, cut, union, within
from quorum_attention.quorums import chunk_count, interest_set, quorum_size, quorum_sizes

# Shares may differ by this much from an equal one where that saves bytes.
_TOLERATED = 1.05
# Gathered rows are kept for the backward where they take at most this much of what shards take.
_KEPT = 1.25
# Transfers of one stage run beside the computation of another; more stages are shorter calls.
_STAGES = 4
# Chunks of a quorum set for each rank of a group, at most; and at most so many in all.
_CHUNKS_A_RANK, _MOST_CHUNKS = 8, 133
# Tiles of a shard at least, else tiles are smaller.
_TILE, _TILES = 128, 32
# Moving is little beside computing if it would take such a share of the time by itself; most of it
# runs beside. Of an H200 and its links to others in the same host: 200 GB/s, 400 TFLOP/s.
_LITTLE = 0.2
_BYTES_A_FLOP = 200e9 / 400e12
# Floating-point operations of a rank in a forward: fewer take an H200 less than the 5 ms that the
# host takes to enqueue two calls and their messages.
_WORTH_TWO = 3e12


def step_of(tokens: int) -> int:
    """Rows between two of which it is told how many pairs a mask keeps: at most 1,024 steps."""
    return 1 << max(0, (tokens - 1).bit_length() - 10)


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
        turns: calls that a rank's share is cut into where heads are exchanged whole.
        kept: under a mask, the pairs of a head's rows before each multiple of ``step_of`` the
            tokens, and of all of them; between two the rows count alike. Else None.
    """

    starts: tuple[int, ...]
    heads: int
    kv_heads: int
    is_causal: bool
    units: Literal["pairs", "rows", "heads"] = "pairs"
    turns: int = 1
    kept: tuple[int, ...] | None = None

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
        return self.heads * self.above(self.tokens)

    @property
    def tile(self) -> int:
        """Rows are cut at multiples of it: of a kernel's tile where there are many rows."""
        return min(_TILE, 1 << max(1, self.tokens // self.ranks // _TILES).bit_length() - 1)

    def above(self, row: int) -> int:
        """Pairs of the rows before ``row`` of one head."""
        if self.kept is None:
            return Band(high=0 if self.is_causal else None).count(0, row, 0, self.tokens)
        step = step_of(self.tokens)
        at, part = divmod(row, step)
        low, high = self.kept[at], self.kept[min(at + 1, len(self.kept) - 1)]
        return low + (high - low) * part // max(1, min(step, self.tokens - at * step))

    def row_of(self, pairs: int) -> int:
        """The row before which there are so many pairs, at the end of a tile."""
        row = bisect_left(range(self.tokens), pairs, key=self.above)
        return min(self.tokens, round(row / self.tile) * self.tile)

    def kv_of(self, heads: tuple[int, int]) -> Interval:
        """The key/value heads that query heads read."""
        return Interval(heads[0] // self.share, ceil_div(heads[1], self.share))

    def count(self, block: ShardBlock) -> int:
        """Kept pairs of all heads of a block."""
        rows = block.queries
        one = rows.length * counted(block.keys)
        if self.units != "pairs":  # whole rows
            one = self.above(rows.stop) - self.above(rows.start)
        elif block.causal:  # a square
            one = rows.length * (rows.length + 1) // 2
        return block.heads.length * one

    def blocks(self, heads: Interval, rows: tuple[int, int]) -> Iterator[ShardBlock]:
        """The blocks of whole rows."""
        mine = Interval(*rows)
        if mine.length <= 0 or not heads.length:
            return
        if self.units != "pairs" or not self.is_causal:
            yield ShardBlock(heads, mine, (Interval(0, self.tokens),), self.is_causal)
            return
        if mine.start:
            yield ShardBlock(heads, mine, (Interval(0, mine.start),))
        yield ShardBlock(heads, mine, (mine,), causal=True)


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """A plain attention call: the rows of some query heads against some keys.

    Attributes:
        heads: query heads.
        queries: positions.
        keys: positions, ascending and disjoint.
        causal: keys up to the query's position are kept; all of them, or those of a square.
    """

    heads: Interval
    queries: Interval
    keys: tuple[Interval, ...]
    causal: bool = False


class Side(NamedTuple):
    """What rows are of: queries of some query heads, or keys and values of some key/value heads."""

    of_keys: bool
    heads: Interval


class RowSlice(NamedTuple):
    """Rows of some heads that one rank owns and one rank computes with.

    Attributes:
        side, rows: what they are of; positions.
        rank: computes.
        stage: of that rank.
        owner: holds the rows in its shard; may be ``rank`` itself.
        alone: no other rank computes with them, so what comes back needs no adding up.
    """

    side: Side
    rows: Interval
    rank: int
    stage: int
    owner: int
    alone: bool

    @property
    def vectors(self) -> int:
        """Rows of all its heads."""
        return self.side.heads.length * self.rows.length


Stages = tuple[tuple[ShardBlock, ...], ...]


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
    """

    way: str
    of: Sequences
    shares: tuple[Stages, ...]
    whole_heads: bool = False

    @property
    def n_stages(self) -> int:
        """Stages of the rank that has most of them."""
        return max(map(len, self.shares))

    def pairs(self, rank: int) -> int:
        """Pairs that a rank computes."""
        return sum(map(self.of.count, chain.from_iterable(self.shares[rank])))

    @property
    def imbalance(self) -> float:
        """Pairs of the rank with most of them, over an equal share; 1 is perfect."""
        most = max(self.pairs(rank) for rank in range(self.of.ranks))
        return most * self.of.ranks / self.of.pairs if self.of.pairs else 1.0

    def blocks(self, rank: int, stage: int) -> tuple[ShardBlock, ...]:
        """What a rank computes in a stage; nothing after its last."""
        return next(iter(self.shares[rank][stage:]), ())

    def needs(self, rank: int, stage: int) -> dict[Side, tuple[Interval, ...]]:
        """The rows that a rank needs in a stage: of queries, then of the keys, which have the same
        heads for all of its blocks."""
        needed: dict[Side, list[Interval]] = defaultdict(list)
        for block in self.blocks(rank, stage):
            needed[Side(False, block.heads)].append(block.queries)
            needed[Side(True, self.of.kv_of(block.heads))] += block.keys
        return {side: tuple(union(rows)) for side, rows in sorted(needed.items())}

    @cached_property
    def pieces(self) -> tuple[RowSlice, ...]:
        """What moves of inputs; outputs and gradients move the same way or back."""
        needs = [
            (rank, stage, side, rows)
            for rank, stages in enumerate(self.shares)
            for stage in range(len(stages))
            for side, rows in self.needs(rank, stage).items()
        ]
        by_side: dict[Side, list[Interval]] = defaultdict(list)
        for _, _, side, rows in needs:
            by_side[side] += rows
        shared = {side: covered(rows, 2) for side, rows in by_side.items()}
        edges = {side: sorted(chain(self.of.starts, *runs)) for side, runs in shared.items()}
        return tuple(
            RowSlice(
                side, rows, rank, stage, bisect_right(self.of.starts, rows.start) - 1,
                alone=not any(within(rows, shared[side])),
            )
            for rank, stage, side, every in needs
            for rows in chain.from_iterable(cut(rows, edges[side]) for rows in every)
        )  # fmt: skip

    @cached_property
    def kept(self) -> bool:
        """Whether inputs stay where they were computed with until the backward: where rows are
        complete, and gathered take little more than in the shards."""
        complete = all(piece.alone or piece.side.of_keys for piece in self.pieces)
        gathered = sum(piece.vectors for piece in self.pieces)
        return complete and gathered <= _KEPT * self.of.tokens * (self.of.heads + self.of.kv_heads)

    def moving(self, rank: int, stage: int) -> list[RowSlice]:
        """The pieces of a stage that a rank sends or gets."""
        return [p for p in self.pieces if p.stage == stage and rank in (p.rank, p.owner)]

    def most_received(self, sizes: RowBytes) -> int:
        """Bytes received in a forward by the rank that receives most."""
        received: Counter[int] = Counter()
        for piece in self.pieces:
            if piece.rank == piece.owner:
                continue
            received[piece.rank] += piece.vectors * sizes[piece.side.of_keys]
            if not piece.side.of_keys:
                out = sizes.out + (0 if self.kept else sizes.lse)
                received[piece.owner] += piece.vectors * (out if piece.alone else sizes.partial)
        return max(received.values(), default=0)


class RowBytes(NamedTuple):
    """Bytes that move with one row of one head.

    Attributes:
        query: of inputs, to who computes with them.
        key: of a key and its value.
        out: of results that come back, where one rank computes all of them.
        partial: of results that have to be added up.
        lse: of the log-sum-exp that comes with ``out``, unless inputs are kept where it is.
    """

    query: int
    key: int
    out: int
    partial: int
    lse: int = 0


def turns_of(flops: float) -> int:
    """Into how many calls whole heads of a rank are cut on a GPU, which computes them on two
    streams: two calls hide messages, and were faster than one, three or four where the host keeps
    ahead. On one stream the end of each leaves most of the device idle for a while."""
    return 2 if flops >= _WORTH_TWO else 1


@lru_cache(maxsize=256)
def choose(of: Sequences, sizes: RowBytes, pair_flops: float = 0.0) -> Assignment:
    """The way by which the rank that receives most bytes receives fewest.

    Only ways whose largest share of the work is within 5 % of an equal one are compared; if there
    is none, the most even one is taken. Where the heads divide by the ranks, exchanging them is
    also taken if the next best saves less than half of the bytes, or if they take little time
    beside computing: other ways take more and smaller calls, whose results have to be merged. One
    that takes no more calls and moves fewer bytes is taken then, too (few key/value heads).

    Args:
        pair_flops: floating-point operations of one pair of one head.
    """
    if of.units != "pairs":
        return heads(of)

    def cost(way: Assignment) -> tuple[float, int, float]:
        return max(_TOLERATED, way.imbalance), way.most_received(sizes), way.imbalance

    def calls(way: Assignment) -> int:
        """Of the rank that makes most; where heads are whole, turns do not count."""
        return 1 if way.whole_heads else max(sum(map(len, stages)) for stages in way.shares)

    ways = list(every_way(of))
    whole, fewest = ways[0], min(ways, key=cost)
    little = _LITTLE * of.pairs / of.ranks * pair_flops * _BYTES_A_FLOP
    enough = max(2 * fewest.most_received(sizes), little)
    if of.heads % of.ranks or whole.most_received(sizes) > enough:
        return fewest
    return min((way for way in ways if calls(way) <= calls(whole)), key=cost)


def every_way(of: Sequences) -> Iterator[Assignment]:
    """All that are compared, the exchange of heads first."""
    yield heads(of)
    if of.ranks > 1:
        yield keys(of)
        most = min(_MOST_CHUNKS, max(3, _CHUNKS_A_RANK * of.ranks))
        every = map(chunk_count, quorum_sizes(12))
        yield from (quorums(of, chunks) for chunks in every if of.ranks <= chunks <= most)


def heads(of: Sequences) -> Assignment:
    """Heads exchanged; see the top of this file."""
    whole = of.tokens > 0 and not of.heads % of.ranks and not of.kv_heads % of.ranks
    shares, every = [], Interval(0, of.tokens)
    head, row = 0, 0
    for rank in range(1, of.ranks + 1):
        # Head and row at which the next rank's share begins.
        last, part = divmod(rank * of.heads, of.ranks)
        stop = 0 if of.units == "heads" else of.row_of(of.above(of.tokens) * part // of.ranks)
        parts: list[tuple[Interval, Interval]] = []
        if row and head < last:
            parts.append((Interval(head, head + 1), Interval(row, of.tokens)))
            head, row = head + 1, 0
        runs = _by_groups(of, head, last, of.turns if whole else _STAGES)
        parts += [(run, every) for run in runs]
        parts.append((Interval(last, last + 1), Interval(row, stop)))
        shares.append(_staged(of, chain.from_iterable(starmap(of.blocks, parts))))
        head, row = last, stop
    return Assignment("heads exchanged", of, tuple(shares), whole)


def _by_groups(of: Sequences, first: int, last: int, most: int = _STAGES) -> list[Interval]:
    """Whole heads in runs: ``most`` of all query heads of some key/value heads, or of some of
    one's."""
    cuts = range(round_up(first, of.share), last + 1, of.share)
    n = max(1, min(most, len(cuts) - 1))
    edges = {first, last, *(cuts[(len(cuts) - 1) * i // n] for i in range(n + 1) if cuts)}
    return [Interval(a, b) for a, b in pairwise(sorted(edges))]


def _staged(of: Sequences, blocks: Iterable[ShardBlock]) -> Stages:
    """A stage for each set of key/value heads."""
    stages: dict[Interval, list[ShardBlock]] = defaultdict(list)
    for block in blocks:
        stages[of.kv_of(block.heads)].append(block)
    return tuple(tuple(together) for _, together in sorted(stages.items()))


def keys(of: Sequences) -> Assignment:
    """Keys and values moved; a rank with too much work gives away its last rows."""
    runs = _by_groups(of, 0, of.heads)
    shares = [starmap(of.blocks, product(runs, rows)) for rows in _rows_by_work(of)]
    stages = tuple(_staged(of, chain.from_iterable(share)) for share in shares)
    return Assignment("keys and values moved", of, stages)


def _rows_by_work(of: Sequences) -> list[list[Interval]]:
    """By rank, rows of equal work: as far as possible those of its own shard."""
    fair = of.above(of.tokens) // of.ranks
    shards = [[Interval(*ends)] for ends in pairwise(of.starts)]
    found: list[list[Interval]] = [[] for _ in shards]
    # First each rank fills up from its own shard, then from what others have left of theirs.
    for sources in (shards, repeat(spare := list[Interval]())):
        for rows, source in zip(found, sources, strict=False):
            while source and (lack := fair - sum(of.above(b) - of.above(a) for a, b in rows)) > 0:
                start, stop = source.pop(0)
                middle = min(stop, max(start, of.row_of(of.above(start) + lack)))
                rows.append(Interval(start, middle))
                if middle < stop:
                    source.insert(0, Interval(middle, stop))
                    break
        for source in shards:
            spare += source
            source.clear()
    found[0] += spare  # a rounding's worth
    return [union(piece for piece in rows if piece.length) for rows in found]


def quorums(of: Sequences, chunks: int) -> Assignment:
    """Tasks of a cyclic quorum set: each has the pairs of any two of its chunks, and one's own."""
    size = ceil_div(of.tokens, chunks * of.tile) * of.tile
    edges = [min(of.tokens, size * number) for number in range(chunks + 1)]
    spans = list(starmap(Interval, pairwise(edges)))
    runs, interest = _by_groups(of, 0, of.heads), interest_set(quorum_size(chunks))
    parts: list[list[ShardBlock]] = [[] for _ in range(of.ranks)]
    for task in range(chunks):
        mine = parts[task * of.ranks // chunks]
        held = [span for at in interest if (span := spans[(task + at) % chunks]).length]
        for rows in held:
            own = rows == spans[task]
            others = (k for k in held if (k < rows if of.is_causal else own or k != rows))
            if keys := tuple(union(others)):
                mine += [ShardBlock(heads, rows, keys) for heads in runs]
            if own and of.is_causal:
                mine += [ShardBlock(heads, rows, (rows,), causal=True) for heads in runs]
    return Assignment(f"quorums of {chunks} chunks", of, tuple(_staged(of, one) for one in parts))
