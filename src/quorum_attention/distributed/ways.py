"""How the pairs of a sharded call are given to ranks, and which way moves the fewest bytes.

* *heads*: the rows of all heads in one line, head after head, are cut into shares of equal work.
  Where the heads divide by the ranks this is the exchange of heads of DeepSpeed-Ulysses; where they
  do not, the head at a cut is shared by rows.
* *keys*: a rank computes rows of its own, and keys and values come to it (as in ring attention).
  Under causal masking the last ranks have most work, and give rows to the first.
* *quorums*: a rank computes tasks of a cyclic quorum set, and so needs about sqrt(ranks) chunks
  instead of all; its partial results are merged where the rows belong.
* *local first*, of causal calls: a rank computes its own triangle, and rectangles are shared by
  heads among the rank that has the keys and the one that has the rows. Of three ranks on more
  bytes move, but hardly any that a rank waits for (``local_first.py``).
* a mesh of two of them: heads are exchanged among groups of ranks, and within a group the
  sequence is shared in one of the other ways.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from quorum_attention.decomposition import Decomposition
from quorum_attention.decomposition.intervals import Interval, union
from quorum_attention.distributed.assignment import (
    Assignment,
    Block,
    RowBytes,
    Sequences,
    Stages,
)
from quorum_attention.quorums import quorum_sizes

# Shares may differ by this much from an equal one where that saves bytes.
_TOLERATED = 1.05
# Transfers of one stage run beside the computation of another; more stages are shorter calls.
_STAGES = 4
# Chunks of a quorum set for each rank of a group, at most; and at most so many in all.
_CHUNKS_A_RANK, _MOST_CHUNKS = 8, 133
_TILE = 128
# Moving is little beside computing if it would take such a share of the time by itself; most of it
# runs beside. Of an H200 and its links to others in the same host: 200 GB/s, 400 TFLOP/s.
_LITTLE = 0.2
_BYTES_A_FLOP = 200e9 / 400e12
# Bytes of the device's own memory, likewise: of merging.
_OWN_BYTES_A_FLOP = 3000e9 / 400e12
# What is not hidden behind computing has to be less by such a share of the time of computing for
# rows to be merged.
_WORTH_MERGING = 0.02


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
    found = [way for way in every_way(of) if way.of.ranks]
    even = [way for way in found if way.imbalance <= _TOLERATED]
    if not even:
        return min(found, key=lambda way: (way.imbalance, way.most_received(sizes)))
    fewest = min(even, key=lambda way: (way.most_received(sizes), way.imbalance))
    whole = found[0]
    moved = whole.most_received(sizes)
    little = _LITTLE * of.pairs / of.ranks * pair_flops * _BYTES_A_FLOP
    if of.heads % of.ranks or moved > max(2 * fewest.most_received(sizes), little):
        return fewest
    simple = [way for way in even if way.most_calls <= whole.most_calls]
    return min(simple, key=lambda way: way.most_received(sizes))


def local_first(of: Sequences) -> Assignment | None:
    """Own triangles first; None where shards are of unequal work, or heads have no halves."""
    halves = not of.heads % 2 and (of.kv_heads == 1 or not of.kv_heads % 2)
    if not of.is_causal or of.units != "pairs" or of.ranks < 2 or not halves:
        return None
    middle = of.heads // 2
    shards = [Interval(*edges) for edges in pairwise(of.starts)]
    shares = []
    for rank, own in enumerate(shards):
        first, second = Interval(0, middle), Interval(middle, of.heads)
        serves = [Block(first, rows, (own,)) for rows in shards[rank + 1 :]]
        owns = [Block(second, own, (keys,)) for keys in shards[:rank]]
        stages = ((Block(first, own, (own,), True), *serves),
                  (Block(second, own, (own,), True), *owns))  # fmt: skip
        shares.append(stages if of.kv_heads > 1 else (stages[0] + stages[1],))
    made = Assignment("local first", of, tuple(shares), local_first=True)
    return made if made.imbalance <= _TOLERATED else None


def hides_more(
    of: Sequences, exchanged: int, turns: int, value_bytes: int, pair_flops: float
) -> bool:
    """Whether ``local_first`` leaves less to wait for than the exchange of heads, counted: of the
    exchange the first turn's inputs and the last one's results, of the other its merging.

    Args:
        exchanged: bytes that a rank receives.
        turns: of the exchange.
        value_bytes: of a row of values of one head.
    """
    computing = of.pairs / of.ranks * pair_flops
    waiting = exchanged / turns / _BYTES_A_FLOP
    # The last rank's rows have as many parts as there are ranks; each is read, merged, written.
    rows = of.tokens - of.starts[-2]
    merging = 3 * (of.ranks - 1) * rows * of.heads * value_bytes / _OWN_BYTES_A_FLOP
    return waiting - merging > _WORTH_MERGING * computing


def every_way(of: Sequences) -> Iterator[Assignment]:
    """All that are compared, the exchange of heads first."""
    yield heads(of)
    for groups in range(1, of.ranks):
        if of.ranks % groups or of.heads % groups:
            continue
        if groups > 1 and of.kv_heads % groups and groups % of.kv_heads:
            continue
        yield keys(of, groups, first=True)
        if of.is_causal:
            yield keys(of, groups, first=False)
        for chunks in _chunk_counts(of.ranks // groups):
            yield quorums(of, groups, chunks)


def _chunk_counts(ranks: int) -> Iterator[int]:
    for size in quorum_sizes(12):
        chunks = size * (size - 1) + 1
        if ranks <= chunks <= min(_MOST_CHUNKS, max(3, _CHUNKS_A_RANK * ranks)):
            yield chunks


def heads(of: Sequences) -> Assignment:
    """Heads exchanged; see the top of this file."""
    edges = [_point(of, Fraction(rank * of.heads, of.ranks)) for rank in range(of.ranks + 1)]
    shares = []
    for (head, row), (last, stop) in pairwise(edges):
        parts: list[tuple[Interval, Interval]] = []
        if head == last:
            parts.append((Interval(head, head + 1), Interval(row, stop)))
        else:
            first = head
            if row:
                parts.append((Interval(head, head + 1), Interval(row, of.tokens)))
                first += 1
            parts += [(run, Interval(0, of.tokens)) for run in _by_groups(of, first, last)]
            if stop:
                parts.append((Interval(last, last + 1), Interval(0, stop)))
        shares.append(_staged(of, parts))
    whole = of.tokens > 0 and not of.heads % of.ranks and not of.kv_heads % of.ranks
    return Assignment("heads exchanged", of, tuple(shares), whole)


def _point(of: Sequences, at: Fraction) -> tuple[int, int]:
    """Head and row where a share of the work ends that is ``at`` heads large."""
    head, part = divmod(at, 1)
    if of.units == "heads":
        return int(head), 0
    row = math.sqrt(part) if of.is_causal else float(part)
    return int(head), _rounded(row * of.tokens, of.tokens)


def _rounded(row: float, tokens: int) -> int:
    """A row near ``row``; a multiple of a kernel's tile where there are many."""
    tile = _TILE if tokens >= 64 * _TILE else 1
    return min(tokens, round(row / tile) * tile)


def _by_groups(of: Sequences, first: int, last: int) -> list[Interval]:
    """Whole heads in runs: of all query heads of some key/value heads, or of some of one's."""
    if first >= last:
        return []
    inner = Interval(-(-first // of.share) * of.share, last // of.share * of.share)
    if inner.start >= inner.stop:
        # At most two key/value heads, neither with all its query heads.
        edges = [first, *(e for e in {inner.start, inner.stop} if first < e < last), last]
    else:
        groups = inner.length // of.share
        n = min(_STAGES, groups)
        cuts = [inner.start + groups * i // n * of.share for i in range(n + 1)]
        edges = [first, *cuts, last]
    edges = sorted(set(edges))
    return [Interval(a, b) for a, b in pairwise(edges)]


def _staged(of: Sequences, parts: list[tuple[Interval, Interval]]) -> Stages:
    """A stage for each set of key/value heads."""
    stages: dict[Interval, list[Block]] = defaultdict(list)
    for run, rows in parts:
        for block in of.blocks(run, rows):
            stages[of.kv_of(run)].append(block)
    return tuple(tuple(blocks) for _, blocks in sorted(stages.items()))


def keys(of: Sequences, groups: int, first: bool) -> Assignment:
    """Keys and values moved, within ``groups`` groups of ranks with some of the heads each.

    Args:
        first: a rank with too much work gives away its first rows; else its last.
    """
    size = of.ranks // groups
    rows = _rows_by_work(of, groups, first)
    shares: list[Stages] = [()] * of.ranks
    for group in range(groups):
        runs = _head_runs(of, groups, group)
        for member in range(size):
            parts = [(run, piece) for run in runs for piece in rows[member]]
            shares[member * groups + group] = _staged(of, parts)
    way = "keys and values moved" + (", first rows given away" if first and of.is_causal else "")
    return Assignment(_meshed(way, groups), of, tuple(shares))


def _head_runs(of: Sequences, groups: int, group: int) -> list[Interval]:
    low, high = (of.heads * at // groups for at in (group, group + 1))
    return _by_groups(of, low, high)


def _meshed(way: str, groups: int) -> str:
    return f"heads exchanged {groups} ways, {way}" if groups > 1 else way


def _rows_by_work(of: Sequences, groups: int, first: bool) -> list[list[Interval]]:
    """By member of a group, rows of equal work: as far as possible those near its own shard."""
    members = of.ranks // groups
    fair = of.pairs_of(0, of.tokens) / members
    found: list[list[Interval]] = []
    spare: list[Interval] = []
    for member in range(members):
        low, high = of.starts[member * groups], of.starts[(member + 1) * groups]
        middle = high
        if of.pairs_of(low, high) > fair:
            if first:
                middle = _row_of(of, low, of.pairs_of(low, high) - fair)
                spare.append(Interval(low, middle))
                low, middle = middle, high
            else:
                middle = _row_of(of, low, fair)
                spare.append(Interval(middle, high))
        found.append([Interval(low, middle)])
    for rows in found:
        lack = fair - sum(of.pairs_of(*piece) for piece in rows)
        while lack > 0 and spare:
            start, stop = spare.pop(0)
            if of.pairs_of(start, stop) > lack:
                middle = _row_of(of, start, lack)
                spare.insert(0, Interval(middle, stop))
                stop, lack = middle, 0
            lack -= of.pairs_of(start, stop)
            rows.append(Interval(start, stop))
    found[0].extend(spare)  # a rounding's worth
    return [union(piece for piece in rows if piece.length) for rows in found]


def _row_of(of: Sequences, start: int, pairs: float) -> int:
    """The row up to which the rows from ``start`` have so many pairs."""
    if of.is_causal:
        return max(start, _rounded(math.sqrt(start * start + 2 * pairs), of.tokens))
    return max(start, _rounded(start + pairs / of.tokens, of.tokens))


def quorums(of: Sequences, groups: int, chunks: int) -> Assignment:
    """Tasks of a cyclic quorum set, within ``groups`` groups of ranks with some heads each."""
    size = of.ranks // groups
    tile = _TILE if of.tokens >= 64 * _TILE else 1
    tasks = list(Decomposition(of.tokens, (chunks,), tile=tile).tasks())
    parts: list[list[Block]] = [[] for _ in range(size)]
    nobody = Interval(0, 0)
    for number, task in enumerate(tasks):
        mine = parts[number * size // chunks]
        for r in task.rectangles(of.is_causal):
            columns = tuple(
                Interval(k.start, k.stop) for k in task.segments(r.key_start, r.key_stop)
            )
            if r.causal:
                mine += (Block(nobody, piece, (piece,), causal=True) for piece in columns)
                mine += _below(columns)
                continue
            for rows in task.segments(r.query_start, r.query_stop):
                mine.append(Block(nobody, Interval(rows.start, rows.stop), columns))
    shares: list[Stages] = [()] * of.ranks
    for group in range(groups):
        runs = _head_runs(of, groups, group)
        for member in range(size):
            stages: dict[Interval, list[Block]] = defaultdict(list)
            for run in runs:
                for b in parts[member]:
                    stages[of.kv_of(run)].append(Block(run, b.queries, b.keys, b.causal))
            shares[member * groups + group] = tuple(tuple(s) for _, s in sorted(stages.items()))
    return Assignment(_meshed(f"quorums of {chunks} chunks", groups), of, tuple(shares))


def _below(pieces: tuple[Interval, ...]) -> Iterator[Block]:
    """What a causal square keeps off the diagonal, if it lies over several runs of tokens."""
    for at, rows in enumerate(pieces):
        if at:
            yield Block(Interval(0, 0), rows, pieces[:at])


__all__ = ["choose", "every_way", "heads", "hides_more", "keys", "local_first", "quorums"]
