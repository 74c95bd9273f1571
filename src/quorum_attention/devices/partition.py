"""A call in blocks that devices compute independently of each other: heads first, then rows.

Each device has a stretch of the line of all heads that goes by its speed (``partition.py`` of the
package). The rows of a block see all of their keys, so that its output is complete and nothing has
to be merged. With dropout, which counts positions from the first row, no rows are cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

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
# Blocks for each device where the times of blocks are not known beforehand, so that others can take
# what one device is too slow for. Heads are cut only where each device has fewer than this: the
# gradients of their keys and values have to be added up.
_PIECES = 10
_FEW_HEADS = 4
# No work item takes much longer: a device that is lost loses all of its work item.
_LONGEST_SECONDS = 2.0


def block_of(shape: CallShape, entry: int, heads: Interval, rows: Interval) -> CallBlock:
    """Return the block of some rows of query heads, with all the keys they see.

    The last rows have every key, so that the gradient of a key that no row sees is written as well.
    """
    sees_fewer_keys = shape.is_causal and not shape.dropout and rows.stop < shape.n_queries
    n_keys = min(rows.stop, shape.n_keys) if sees_fewer_keys else shape.n_keys
    return CallBlock(Interval(entry, entry + 1), heads, rows, Interval(0, n_keys))


def is_whole(shape: CallShape, block: CallBlock) -> bool:
    """Return whether no other block contributes to the gradients of a block's keys."""
    has_whole_groups = not any(edge % shape.queries_per_key_head for edge in block.heads)
    return has_whole_groups and block.rows == (0, shape.n_queries)


def pairs(shape: CallShape, block: CallBlock) -> int:
    """Return the query-key pairs of a block, as if nothing but later keys were masked."""
    return block.heads.length * _row_work(shape).pairs(block.rows)


def pieces_of(shape: CallShape, speeds: Mapping[int, float], *, uniform_cost: bool) -> int:
    """Return into how many pieces the share of each device is cut.

    Args:
        speeds: of the devices, in pairs a second.
        uniform_cost: whether all are GPUs of one kind, and blocks take as long as their pairs say.
    """
    heads_per_device = shape.batch * shape.kv_heads // len(speeds)
    if not uniform_cost:
        return _PIECES if heads_per_device < _FEW_HEADS else min(_PIECES, heads_per_device)
    # One call of many heads is quicker than several.
    seconds = shape.batch * shape.heads * shape.pairs / sum(speeds.values())
    n_pieces = math.ceil(seconds / _LONGEST_SECONDS - 1e-3)
    return max(1, min(n_pieces, heads_per_device))


def partition(shape: CallShape, speeds: Sequence[float], pieces: int = 1) -> list[list[CallBlock]]:
    """Return the blocks of each device, in order; the same ones for calls of the same sizes.

    Args:
        speeds: of the devices, relative to each other.
        pieces: into how many the share of each device is cut, so that others can take some.
    """
    n_heads = shape.batch * shape.kv_heads
    if not n_heads or not shape.n_queries:
        return [[] for _ in speeds]
    speed_sums = list(accumulate(map(Fraction, speeds), initial=Fraction(0)))
    edges = [n_heads * speed_sum / speed_sums[-1] for speed_sum in speed_sums]
    return [_share(shape, start, stop, pieces) for start, stop in pairwise(edges)]


def _share(shape: CallShape, start: Fraction, stop: Fraction, pieces: int) -> list[CallBlock]:
    """Return the blocks of one device, between two positions in the line of key/value heads."""
    inner = [start + (stop - start) * piece / pieces for piece in range(1, pieces)]
    if stop - start >= pieces:
        inner = [Fraction(round(edge)) for edge in inner]
    cuts = [edge * shape.queries_per_key_head for edge in (start, *inner, stop)]
    stretches = cut_line(_row_work(shape), cuts)
    return [block for stretch in stretches for rows in stretch for block in _blocks(shape, rows)]


def _blocks(shape: CallShape, rows: RowBlock) -> list[CallBlock]:
    """Return the blocks of heads that are numbered through all batch entries.

    A block has whole key/value heads of one batch entry, or some query heads of one.
    """
    return [
        block_of(shape, entry_heads.start // shape.heads, _within_entry(shape, run), rows.rows)
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
