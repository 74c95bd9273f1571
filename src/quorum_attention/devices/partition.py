"""A call in blocks that devices compute independently of each other: heads first, then
rows.

Each device has a stretch of the line of all heads that goes by its speed
(``partition.py`` of the package). The rows of a block see all of their keys, so that
its output is complete and nothing has to be merged. With dropout, which counts
positions from the first row, no rows are cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from quorum_attention.call.block import CallBlock
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.partition import (
    RowBlock,
    RowWork,
    cut_line,
    split_at_multiples,
    split_groups,
)

# Rows are cut at multiples of a kernel's tile.
_TILE = 128
# Blocks for each device where the times of blocks are not known beforehand, so that
# others can take what one device is too slow for. Heads are cut only where each device
# has fewer than this: the gradients of their keys and values have to be added up.
_PIECES = 10
_FEW_HEADS = 4
# No work item takes much longer. A device that is lost loses all heads of its work item
# that nobody knows to be stored.
_LONGEST_SECONDS = 2.0


def block_of(
    shape: CallShape, entry: int, heads: Interval, rows: Interval
) -> CallBlock:
    """Return the block of some rows of query heads, with all the keys they see.

    The last rows have every key, so that the gradient of a key that no row sees is
    written as well.
    """
    n_keys = shape.n_keys
    has_last_rows = rows.stop == shape.n_queries
    if shape.is_causal and not shape.dropout and not has_last_rows:
        n_keys = min(rows.stop, n_keys)
    entries = Interval(entry, entry + 1)
    return CallBlock(entries, heads, rows, Interval(0, n_keys))


def is_whole(shape: CallShape, block: CallBlock) -> bool:
    """Return whether no other block contributes to the gradients of a block's keys."""
    if block.rows != (0, shape.n_queries):
        return False
    group_size = shape.queries_per_key_head
    return not any(edge % group_size for edge in block.heads)


def pairs(shape: CallShape, block: CallBlock) -> int:
    """Return the query-key pairs of a block, as if nothing but later keys were
    masked."""
    return block.heads.length * _row_work(shape).pairs(block.rows)


def pieces_of(
    shape: CallShape, speeds: Mapping[int, float], *, uniform_cost: bool
) -> int:
    """Return into how many pieces the share of each device is cut.

    Args:
        speeds: of the devices, in pairs a second.
        uniform_cost: whether all are GPUs of one kind, and blocks take as long as their
            pairs say.
    """
    n_heads = shape.batch * shape.kv_heads
    heads_per_device = n_heads // len(speeds)
    if not uniform_cost:
        if heads_per_device < _FEW_HEADS:
            return _PIECES
        return min(_PIECES, heads_per_device)
    # One call of many heads is quicker than several.
    n_pairs = shape.lanes * shape.pairs
    seconds = n_pairs / sum(speeds.values())
    n_pieces = math.ceil(seconds / _LONGEST_SECONDS - 1e-3)
    return max(1, min(n_pieces, heads_per_device))


def partition(
    shape: CallShape, speeds: Sequence[float], pieces: int = 1
) -> list[list[CallBlock]]:
    """Return the blocks of each device, in order; the same ones for calls of the same
    sizes.

    Args:
        speeds: of the devices, relative to each other.
        pieces: into how many the share of each device is cut, so that others can take
            some.
    """
    n_heads = shape.batch * shape.kv_heads
    if not n_heads or not shape.n_queries:
        return [[] for _ in speeds]
    exact_speeds = [Fraction(speed) for speed in speeds]
    heads_per_speed = n_heads / sum(exact_speeds, start=Fraction(0))
    shares: list[list[CallBlock]] = []
    start = Fraction(0)
    for speed in exact_speeds:
        stop = start + speed * heads_per_speed
        shares.append(_share(shape, start, stop, pieces))
        start = stop
    return shares


def _share(
    shape: CallShape, start: Fraction, stop: Fraction, pieces: int
) -> list[CallBlock]:
    """Return the blocks of one device, between two positions in the line of key/value
    heads."""
    n_heads = stop - start
    cuts: list[Fraction] = []
    for piece in range(pieces + 1):
        cut = start + n_heads * piece / pieces
        if n_heads >= pieces and 0 < piece < pieces:
            cut = Fraction(round(cut))
        cuts.append(cut * shape.queries_per_key_head)
    blocks: list[CallBlock] = []
    for stretch in cut_line(_row_work(shape), cuts):
        for rows in stretch:
            blocks += _blocks(shape, rows)
    return blocks


def _blocks(shape: CallShape, rows: RowBlock) -> list[CallBlock]:
    """Return the blocks of heads that are numbered through all batch entries.

    A block has whole key/value heads of one batch entry, or some query heads of one.
    """
    return [
        block_of(
            shape,
            entry_heads.start // shape.heads,
            _within_entry(shape, run),
            rows.rows,
        )
        for entry_heads in split_at_multiples(rows.heads, shape.heads)
        for run in split_groups(entry_heads, shape.queries_per_key_head)
    ]


def _within_entry(shape: CallShape, heads: Interval) -> Interval:
    """Return heads of the line by their numbers in their batch entry."""
    first = heads.start % shape.heads
    return Interval(first, first + heads.length)


def _row_work(shape: CallShape) -> RowWork:
    """Return the rows of a head; with dropout they stay together."""
    tile = shape.n_queries if shape.dropout else _TILE
    return RowWork(shape.n_queries, tile, shape.pairs_above)
