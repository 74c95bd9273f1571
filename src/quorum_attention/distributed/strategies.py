"""How the pairs of a sharded call are shared among the ranks. No torch.

The strategy is taken that moves fewest bytes, of three:

* *heads exchanged*: the rows of all heads in one line, head after head, are cut into
  shares of equal work. Where the heads divide by the ranks this is the exchange of
  heads of DeepSpeed-Ulysses; where they do not, the head at a cut is shared by rows.
* *keys and values moved*: a rank computes rows of its own, and keys and values come to
  it (as in ring attention). Under causal masking the last ranks have most work, and
  give rows to the first.
* *quorums*: a rank computes tasks of a cyclic quorum set, and so needs about
  sqrt(ranks) chunks instead of all; its partial results are merged where the rows
  belong.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

from quorum_attention.decomposition import Decomposition
from quorum_attention.decomposition.intervals import Interval, union
from quorum_attention.distributed.assignment import (
    Assignment,
    RowBytes,
    ShardBlock,
    Stages,
)
from quorum_attention.distributed.sharded_shape import ShardedShape
from quorum_attention.partition import RowBlock, RowWork, cut_line, split_groups
from quorum_attention.quorums import (
    chunk_count,
    interest_set,
    quorum_size,
    quorum_sizes,
)

# Shares may differ by this much from an equal one where that saves bytes.
_TOLERATED_IMBALANCE = 1.05
# The exchange of one stage runs beside the computation of another; more stages are
# shorter calls.
_MAX_STAGES = 4
# Chunks of a quorum set: at most so many for each rank of a group, and in all.
_MAX_CHUNKS_PER_RANK = 8
_MAX_CHUNKS = 133
_MAX_QUORUM_SIZE = 12
# Moving is little beside computing if it would take such a share of the time by itself;
# most of it runs beside. The bytes are of an H200 and its links to others in the same
# host: 200 GB/s, 400 TFLOP/s.
_LITTLE_SHARE = 0.2
_BYTES_PER_FLOP = 200e9 / 400e12
# While a host enqueues one more call with its messages, so many bytes could be moved: a
# millisecond.
_BYTES_PER_CALL = 200_000_000
# Floating-point operations of a rank in a forward, from which on it is cut into two
# calls. At 2e12 two forwards took an H200 3 % less time than one, and both passes
# together 1.5 % more. The host enqueues a forward with its messages in 1.2 ms.
_MIN_FLOPS_OF_TWO_FORWARDS = 1e12
_MIN_FLOPS_OF_TWO_BACKWARDS = 3e12


def n_head_groups(flops: float, records: bool) -> int:
    """Return into how many calls whole heads of a rank are cut on a GPU.

    A GPU computes them on two streams. Two calls hide messages, and were faster than
    one, three or four where the host keeps ahead. On one stream the end of each call
    leaves most of the device idle for a while.

    Args:
        records: whether there may be a backward, which has the forward's groups.
    """
    threshold = _MIN_FLOPS_OF_TWO_FORWARDS
    if records:
        threshold = _MIN_FLOPS_OF_TWO_BACKWARDS
    return 2 if flops >= threshold else 1


@lru_cache(maxsize=256)
def choose_assignment(
    shape: ShardedShape,
    row_bytes: RowBytes,
    pair_flops: float = 0.0,
    *,
    on_gpu: bool = False,
) -> Assignment:
    """Return the assignment by which the rank that receives most bytes receives fewest.

    Only assignments whose largest share of the work is within 5 % of an equal one are
    compared; if there is none, the most even one is taken. Where the heads divide by
    the ranks, exchanging them is also taken if the next best saves less than half of
    the bytes, or if they take little time beside computing: other ways take more and
    smaller calls, whose results have to be merged. A way that takes no more calls and
    moves fewer bytes is taken then, too (few key/value heads).

    On a GPU many calls cost, too: where the host takes longer for them than the device
    computes, the difference counts as the bytes that could be moved in it.

    Args:
        pair_flops: floating-point operations of one pair of one head.
        on_gpu: whether a host enqueues calls for a device.
    """
    if shape.units != "pairs":
        return exchange_heads(shape)
    flops_of_rank = shape.n_pairs / shape.n_ranks * pair_flops
    bytes_beside_computing = flops_of_rank * _BYTES_PER_FLOP

    def cost_in_bytes(assignment: Assignment) -> float:
        cost_of_calls = 0.0
        if on_gpu:
            cost_of_calls = _n_calls(assignment) * _BYTES_PER_CALL
        uncovered_cost = max(0.0, cost_of_calls - bytes_beside_computing)
        return assignment.most_received(row_bytes) + uncovered_cost

    def cheapest_of(assignments: Iterable[Assignment]) -> Assignment:
        # Bytes are counted of the most even alone: with many ranks that takes seconds
        # for all.
        even = _most_even(assignments)
        return min(even, key=lambda way: (cost_in_bytes(way), way.imbalance))

    ways = all_assignments(shape)
    by_heads = next(ways)
    little_bytes = _LITTLE_SHARE * bytes_beside_computing
    if by_heads.whole_heads and cost_in_bytes(by_heads) <= little_bytes:
        # All others take more calls.
        return by_heads
    assignments = [by_heads, *ways]
    cheapest = cheapest_of(assignments)
    tolerated_cost = max(2 * cost_in_bytes(cheapest), little_bytes)
    heads_divide = shape.heads % shape.n_ranks == 0
    if not heads_divide or cost_in_bytes(by_heads) > tolerated_cost:
        return cheapest
    n_calls = _n_calls(by_heads)
    return cheapest_of(way for way in assignments if _n_calls(way) <= n_calls)


def _most_even(assignments: Iterable[Assignment]) -> list[Assignment]:
    """Return the assignments whose largest share of the work is as small as any, or
    within the tolerated difference from an equal one."""
    by_imbalance: dict[float, list[Assignment]] = defaultdict(list)
    for way in assignments:
        imbalance = max(_TOLERATED_IMBALANCE, way.imbalance)
        by_imbalance[imbalance].append(way)
    return by_imbalance[min(by_imbalance)]


def _n_calls(assignment: Assignment) -> int:
    """Return the calls of the rank that makes most; head groups of whole heads count as
    one."""
    if assignment.whole_heads:
        return 1
    return max(sum(map(len, stages)) for stages in assignment.shares)


def all_assignments(shape: ShardedShape) -> Iterator[Assignment]:
    """Yield all assignments that are compared, the exchange of heads first."""
    yield exchange_heads(shape)
    if shape.n_ranks == 1:
        return
    yield gather_kv(shape)
    most_chunks = min(_MAX_CHUNKS, max(3, _MAX_CHUNKS_PER_RANK * shape.n_ranks))
    for n_chunks in map(chunk_count, quorum_sizes(_MAX_QUORUM_SIZE)):
        if shape.n_ranks <= n_chunks <= most_chunks:
            yield quorum_tasks(shape, n_chunks)


def exchange_heads(shape: ShardedShape) -> Assignment:
    """Give each rank a stretch of the line of heads; see the top of this file."""
    n_ranks = shape.n_ranks
    whole_heads = False
    if shape.n_tokens:
        # The query heads divide where the key/value heads do.
        whole_heads = shape.kv_heads % n_ranks == 0
    n_runs = shape.n_head_groups if whole_heads else _MAX_STAGES
    fair_heads = Fraction(shape.heads, n_ranks)
    cuts = [fair_heads * rank for rank in range(n_ranks + 1)]
    shares: list[Stages] = []
    for share in cut_line(shape.row_work, cuts):
        row_blocks: list[RowBlock] = []
        for heads, rows in share:
            runs = split_groups(heads, shape.group_size, n_runs)
            row_blocks.extend(RowBlock(run, rows) for run in runs)
        shares.append(_stages_of_rows(shape, row_blocks))
    return Assignment("heads exchanged", shape, tuple(shares), whole_heads)


def gather_kv(shape: ShardedShape) -> Assignment:
    """Move keys and values to rows; a rank with too much work gives away its last
    rows."""
    runs = _runs_of_heads(shape)
    shares: list[Stages] = []
    for rows_of_rank in _rows_by_work(shape):
        row_blocks = [RowBlock(run, rows) for run in runs for rows in rows_of_rank]
        shares.append(_stages_of_rows(shape, row_blocks))
    return Assignment("keys and values moved", shape, tuple(shares))


def _rows_by_work(shape: ShardedShape) -> list[list[Interval]]:
    """Return for each rank rows of equal work: as far as possible those of its own
    shard."""
    fair_pairs = shape.pairs_above(shape.n_tokens) // shape.n_ranks
    rows_of_ranks: list[list[Interval]] = [[] for _ in shape.shards]
    spare = deque[Interval]()
    for rows, shard in zip(rows_of_ranks, shape.shards, strict=True):
        source = deque([shard])
        _fill_up(shape.row_work, rows, source, fair_pairs)
        spare += source
    for rows in rows_of_ranks:
        _fill_up(shape.row_work, rows, spare, fair_pairs)
    # Rounding leaves a little.
    rows_of_ranks[0] += spare
    unions: list[list[Interval]] = []
    for rows in rows_of_ranks:
        runs = [run for run in rows if run.length]
        unions.append(union(runs))
    return unions


def _fill_up(
    work: RowWork, rows: list[Interval], source: deque[Interval], fair_pairs: int
) -> None:
    """Move rows from the front of ``source`` to ``rows`` until these have
    ``fair_pairs`` pairs."""
    missing = fair_pairs - sum(map(work.pairs, rows))
    while source and missing > 0:
        start, stop = source.popleft()
        end = work.row_at(work.pairs_above(start) + missing)
        end = min(stop, max(start, end))
        moved = Interval(start, end)
        rows.append(moved)
        if end < stop:
            source.appendleft(Interval(end, stop))
            return
        missing -= work.pairs(moved)


def quorum_tasks(shape: ShardedShape, n_chunks: int) -> Assignment:
    """Give ranks tasks of a cyclic quorum set.

    A task has the pairs of any two of its chunks, and the pairs within one of them.
    """
    tile = shape.row_work.tile
    chunks = Decomposition(shape.n_tokens, (n_chunks,), tile=tile).chunks()
    offsets = interest_set(quorum_size(n_chunks))
    blocks_of_ranks: list[list[ShardBlock]] = [[] for _ in shape.shards]
    for task, own_chunk in enumerate(chunks):
        quorum: list[Interval] = []
        for offset in offsets:
            chunk = chunks[(task + offset) % n_chunks]
            # The last chunks may be empty.
            if chunk.length:
                quorum.append(chunk)
        rank = task * shape.n_ranks // n_chunks
        blocks_of_ranks[rank] += _task_blocks(shape, quorum, own_chunk)
    shares = [_in_stages(shape, blocks) for blocks in blocks_of_ranks]
    return Assignment(f"quorums of {n_chunks} chunks", shape, tuple(shares))


def _task_blocks(
    shape: ShardedShape, quorum: Sequence[Interval], own_chunk: Interval
) -> Iterator[ShardBlock]:
    """Yield the blocks of a task, whose pairs within ``own_chunk`` belong to no other
    task."""
    runs = _runs_of_heads(shape)
    for rows in quorum:
        is_own = rows == own_chunk
        key_chunks = _key_chunks(shape, quorum, rows, is_own)
        if key_chunks:
            keys = tuple(union(key_chunks))
            for heads in runs:
                yield ShardBlock(heads, rows, keys)
        if is_own and shape.is_causal:
            for heads in runs:
                yield ShardBlock(heads, rows, (rows,), causal=True)


def _key_chunks(
    shape: ShardedShape, quorum: Sequence[Interval], rows: Interval, is_own: bool
) -> Sequence[Interval]:
    """Return the chunks of a task whose keys all rows of a chunk see."""
    if shape.is_causal:
        return [chunk for chunk in quorum if chunk.stop <= rows.start]
    if is_own:
        return quorum
    return [chunk for chunk in quorum if chunk != rows]


def _runs_of_heads(shape: ShardedShape) -> list[Interval]:
    """Return all query heads in as many runs as there are stages."""
    return split_groups(Interval(0, shape.heads), shape.group_size, _MAX_STAGES)


def _stages_of_rows(shape: ShardedShape, row_blocks: Iterable[RowBlock]) -> Stages:
    """Return rows with all their keys, in stages."""
    blocks: list[ShardBlock] = []
    for heads, rows in row_blocks:
        blocks += _blocks_of_rows(shape, heads, rows)
    return _in_stages(shape, blocks)


def _blocks_of_rows(
    shape: ShardedShape, heads: Interval, rows: Interval
) -> Iterator[ShardBlock]:
    """Yield the blocks of whole rows."""
    if shape.units != "pairs" or not shape.is_causal:
        all_keys = Interval(0, shape.n_tokens)
        yield ShardBlock(heads, rows, (all_keys,), shape.is_causal)
        return
    if rows.start:
        yield ShardBlock(heads, rows, (Interval(0, rows.start),))
    yield ShardBlock(heads, rows, (rows,), causal=True)


def _in_stages(shape: ShardedShape, blocks: Iterable[ShardBlock]) -> Stages:
    """Return a stage for each set of key/value heads."""
    stages: dict[Interval, list[ShardBlock]] = defaultdict(list)
    for block in blocks:
        kv_heads = shape.kv_of(block.heads)
        stages[kv_heads].append(block)
    in_order = [tuple(stages[kv_heads]) for kv_heads in sorted(stages)]
    return tuple(in_order)
