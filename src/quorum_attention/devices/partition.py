"""A call in blocks that devices compute independently of each other: heads first, then rows.

The key/value heads of all batch entries lie side by side, and each device has a stretch of them
that goes by its speed. Where a stretch ends inside a head, that head is cut between its query
heads, and then between rows, by work. The rows of a block see all of their keys, so that its output
is complete and nothing has to be merged; only gradients of keys and values of a head that is cut
are added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from quorum_attention.call.block import Block
from quorum_attention.decomposition.intervals import Interval

# Rows are cut at multiples of a kernel's tile.
_TILE = 128
# Float errors of a cut between two heads are smaller.
_CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a call.

    Attributes:
        rows_may_be_cut: whether a head may be cut between rows.
        all_keys: whether a block has all keys also where none of its queries sees the last of them.
    """

    batch: int
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    is_causal: bool
    rows_may_be_cut: bool = True
    all_keys: bool = False

    @property
    def share(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.kv_heads

    def block(self, entry: int, heads: Interval, rows: Interval) -> Block:
        """Rows of query heads of a batch entry, with all the keys they see."""
        cut = self.is_causal and self.rows_may_be_cut and not self.all_keys
        keys = min(rows.stop, self.n_keys) if cut else self.n_keys
        return Block(Interval(entry, entry + 1), heads, rows, Interval(0, keys))

    def key_heads(self, block: Block) -> Interval:
        """The key/value heads that a block reads."""
        return Interval(block.heads.start // self.share, -(-block.heads.stop // self.share))

    def is_whole(self, block: Block) -> bool:
        """Whether no other block contributes to the gradients of a block's keys."""
        low, high = self.key_heads(block)
        every = (low * self.share, high * self.share)
        return block.heads == every and block.rows == (0, self.n_queries)

    def pairs(self, block: Block) -> int:
        """Query-key pairs of a block, as if nothing but later keys were masked."""
        low, high = (self._pairs_above(row) for row in block.rows)
        return block.heads.length * (high - low)

    def joined(self, one: Block, other: Block) -> Block | None:
        """Two blocks as one, where the second goes on where the first ends and one call can compute
        both; else None. They have some rows of one query head, or all rows."""
        if one.entries != other.entries:
            return None
        if one.heads == other.heads and one.heads.length == 1 and one.rows.stop == other.rows.start:
            heads, rows = one.heads, Interval(one.rows.start, other.rows.stop)
        elif one.rows == other.rows == (0, self.n_queries) and one.heads.stop == other.heads.start:
            heads, rows = Interval(one.heads.start, other.heads.stop), one.rows
        else:
            return None
        first, last = heads.start // self.share, (heads.stop - 1) // self.share
        if first != last and heads != (first * self.share, (last + 1) * self.share):
            return None  # a call has as many query heads for each key/value head
        return self.block(one.entries.start, heads, rows)

    def _pairs_above(self, row: int) -> int:
        """Query-key pairs of a head above a row."""
        if not self.is_causal:
            return row * self.n_keys
        square = min(row, self.n_keys)
        return square * (square + 1) // 2 + (row - square) * self.n_keys

    def _row(self, part: float) -> int:
        """The row at which a part of a head's work is done, at the end of a tile."""
        row = part * self.n_queries
        if self.is_causal:
            pairs = part * self._pairs_above(self.n_queries)
            square = min(self.n_queries, self.n_keys)
            above = square * square / 2
            beyond = square + (pairs - above) / max(1, self.n_keys)
            row = math.sqrt(2 * pairs) if pairs <= above else beyond
        return min(self.n_queries, round(row / _TILE) * _TILE)

    def _point(self, at: float) -> tuple[int, int]:
        """Query head and row at which the work of ``at`` query heads is done."""
        if not self.rows_may_be_cut:
            return round(at), 0
        head = math.floor(at + _CLOSE)
        return head, self._row(max(0.0, at - head))

    def piece(self, head: int, low: float, high: float) -> Iterator[Block]:
        """The blocks between two shares of the work of a key/value head, which is numbered through
        all batch entries."""
        entry, kv = divmod(head, self.kv_heads)
        first = kv * self.share
        (above, start), (below, stop) = (self._point(self.share * at) for at in (low, high))
        runs = [(above, below, 0, self.n_queries), (below, below + 1, 0, stop)]
        if above == below:
            runs = [(above, above + 1, start, stop)]
        elif start:
            runs[:1] = [
                (above, above + 1, start, self.n_queries),
                (above + 1, below, 0, self.n_queries),
            ]
        for one, other, row, end in runs:
            if one < other and row < end:
                yield self.block(entry, Interval(first + one, first + other), Interval(row, end))


def partition(sizes: Sizes, speeds: Sequence[float], pieces: int = 1) -> list[list[Block]]:
    """The blocks of each device, the same ones for calls of the same sizes.

    Args:
        speeds: of the devices, relative to each other.
        pieces: how many blocks each device should have at least, so that others can take some.
    """
    heads = sizes.batch * sizes.kv_heads
    if not heads or not sizes.n_queries:
        return [[] for _ in speeds]
    ends = [heads * at / sum(speeds) for at in accumulate(speeds, initial=0.0)]
    cuts = [round(at) if abs(at - round(at)) < _CLOSE else at for at in ends]
    return [list(_stretch(sizes, low, high, pieces)) for low, high in pairwise(cuts)]


def _stretch(sizes: Sizes, low: float, high: float, pieces: int) -> Iterator[Block]:
    """The blocks of the key/value heads from ``low`` to ``high``, in order."""
    most = max(1, sizes.n_queries // _TILE if sizes.rows_may_be_cut else 1) * sizes.share
    each = min(most, pieces / (high - low)) if high > low else 0.0
    for head in range(math.floor(low), math.ceil(high)):
        start, stop = max(low, head) - head, min(high, head + 1) - head
        count = max(1, math.ceil(each * (stop - start) - _CLOSE))
        inner = (start + (stop - start) * n / count for n in range(1, count))
        for pair in pairwise((start, *inner, stop)):
            yield from sizes.piece(head, *pair)


__all__ = ["Sizes", "partition"]
