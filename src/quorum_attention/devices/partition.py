"""A call in blocks that devices compute independently of each other: heads first, then rows.

The key/value heads of all batch entries lie side by side, and each device has a stretch of them
that goes by its speed. Where a stretch ends inside a head, that head is cut between its query
heads, and then between rows, by work. The rows of a block see all of their keys, so that its output
is complete and nothing has to be merged. With dropout, which counts positions from the first row,
no rows are cut.

Only gradients of keys and values of a head that is cut, and that of a mask, are added up: in fp32
(fp64), rounded once, the rows of a gradient in the order of the blocks, whatever the order of
arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from quorum_attention.call.block import Block, WholeCall
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.buffers import made_for
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.problem import state_dtype

Buffers = dict[str, torch.Tensor]
# Rows are cut at multiples of a kernel's tile.
_TILE = 128
# Float errors of a cut between two heads are smaller.
_CLOSE = 1e-6


def block_of(call: WholeCall, entry: int, heads: Interval, rows: Interval) -> Block:
    """Rows of query heads of a batch entry, with all the keys they see."""
    cut = call.is_causal and call.dropout is None
    keys = min(rows.stop, call.n_keys) if cut else call.n_keys
    return Block(Interval(entry, entry + 1), heads, rows, Interval(0, keys))


def is_whole(call: WholeCall, block: Block) -> bool:
    """Whether no other block contributes to the gradients of a block's keys."""
    share, (low, high) = call.heads // call.kv_heads, call.key_heads(block)
    return block.heads == (low * share, high * share) and block.rows == (0, call.n_queries)


def pairs(call: WholeCall, block: Block) -> int:
    """Query-key pairs of a block, as if nothing but later keys were masked."""
    low, high = (_pairs_above(call, row) for row in block.rows)
    return block.heads.length * (high - low)


def joined(call: WholeCall, one: Block, other: Block) -> Block | None:
    """Two blocks as one, where the second goes on where the first ends and one call can compute
    both; else None. They have some rows of one query head, or all rows."""
    if one.entries != other.entries:
        return None
    if one.heads == other.heads and one.heads.length == 1 and one.rows.stop == other.rows.start:
        heads, rows = one.heads, Interval(one.rows.start, other.rows.stop)
    elif one.rows == other.rows == (0, call.n_queries) and one.heads.stop == other.heads.start:
        heads, rows = Interval(one.heads.start, other.heads.stop), one.rows
    else:
        return None
    both = block_of(call, one.entries.start, heads, rows)
    # A call has as many query heads for each key/value head.
    return both if call.key_heads(both).length == 1 or is_whole(call, both) else None


def partition(call: WholeCall, speeds: Sequence[float], pieces: int = 1) -> list[list[Block]]:
    """The blocks of each device, the same ones for calls of the same sizes.

    Args:
        speeds: of the devices, relative to each other.
        pieces: how many blocks each device should have at least, so that others can take some.
    """
    heads = math.prod(call.batch_shape) * call.kv_heads
    if not heads or not call.n_queries:
        return [[] for _ in speeds]
    ends = [heads * at / sum(speeds) for at in accumulate(speeds, initial=0.0)]
    cuts = [round(at) if abs(at - round(at)) < _CLOSE else at for at in ends]
    return [list(_stretch(call, low, high, pieces)) for low, high in pairwise(cuts)]


def _stretch(call: WholeCall, low: float, high: float, pieces: int) -> Iterator[Block]:
    """The blocks of the key/value heads from ``low`` to ``high``, in order."""
    tiles = max(1, call.n_queries // _TILE if call.dropout is None else 1)
    most = tiles * (call.heads // call.kv_heads)
    each = min(most, pieces / (high - low)) if high > low else 0.0
    for head in range(math.floor(low), math.ceil(high)):
        start, stop = max(low, head) - head, min(high, head + 1) - head
        count = max(1, math.ceil(each * (stop - start) - _CLOSE))
        inner = (start + (stop - start) * n / count for n in range(1, count))
        for part in pairwise((start, *inner, stop)):
            yield from _piece(call, head, *part)


def _piece(call: WholeCall, head: int, low: float, high: float) -> Iterator[Block]:
    """The blocks between two shares of the work of a key/value head, which is numbered through
    all batch entries: rows of its first and last query head, and all rows of those between."""
    entry, kv = divmod(head, call.kv_heads)
    share, n = call.heads // call.kv_heads, call.n_queries
    (above, start), (below, stop) = (_point(call, share * at) for at in (low, high))
    runs = [(above, below, 0, n), (below, below + 1, 0, stop)]
    if above == below:
        runs = [(above, above + 1, start, stop)]
    elif start:
        runs[:1] = [(above, above + 1, start, n), (above + 1, below, 0, n)]
    for one, other, row, end in runs:
        if one < other and row < end:
            heads = Interval(kv * share + one, kv * share + other)
            yield block_of(call, entry, heads, Interval(row, end))


def _point(call: WholeCall, at: float) -> tuple[int, int]:
    """Query head and row at which the work of ``at`` query heads is done."""
    if call.dropout is not None:
        return round(at), 0
    head = math.floor(at + _CLOSE)
    return head, _row(call, max(0.0, at - head))


def _row(call: WholeCall, part: float) -> int:
    """The row at which a part of a head's work is done, at the end of a tile."""
    row = part * call.n_queries
    if call.is_causal:
        above = _pairs_above(call, call.n_queries) * part
        square = min(call.n_queries, call.n_keys) ** 2 / 2
        beyond = math.sqrt(2 * square) + (above - square) / max(1, call.n_keys)
        row = math.sqrt(2 * above) if above <= square else beyond
    return min(call.n_queries, round(row / _TILE) * _TILE)


def _pairs_above(call: WholeCall, row: int) -> int:
    """Query-key pairs of a head above a row."""
    if not call.is_causal:
        return row * call.n_keys
    square = min(row, call.n_keys)
    return square * (square + 1) // 2 + (row - square) * call.n_keys


class _HeadSum:
    """The gradients of one key/value head's keys and values; its first query head is ``first``."""

    def __init__(self, like: Sequence[torch.Tensor], first: int) -> None:
        self.both = [_zeros(t.shape[2:], t) for t in like]
        # Query head and row of what is added next, and what has come before its turn.
        self._next = first, 0
        self.early: dict[tuple[int, int], tuple[Block, list[torch.Tensor]]] = {}

    def add(self, block: Block, made: list[torch.Tensor], n_queries: int) -> None:
        """Add what a block makes of them, in the order of query heads and rows. Blocks have some
        rows of one query head, or all of several."""
        self.early[block.heads.start, block.rows.start] = block, made
        while self._next in self.early:
            (_, heads, rows, _), parts = self.early.pop(self._next)
            for total, part in zip(self.both, parts, strict=True):
                total[: part.shape[0]] += part
            at_end = rows.stop == n_queries
            self._next = (heads.stop, 0) if at_end else (heads.start, rows.stop)


class Sums:
    """The gradients of keys and values of heads that are cut, and that of a mask.

    Args:
        call: the whole call, with one batch dimension.
        key, value: (batch, kv_heads, n_keys, width); the gradients are like them.
        mask: (batch or 1, heads or 1, n_queries or 1, n_keys or 1), if its gradient is wanted.
    """

    def __init__(
        self,
        call: WholeCall,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        self._call, self._like = call, (key, value)
        self._mask = None if mask is None else _zeros(mask.shape, mask)
        self._heads: dict[tuple[int, int], _HeadSum] = {}

    def buffers(self, block: Block) -> Buffers:
        """Where a worker puts those of a block's gradients that are added up, by name; the others
        are results themselves."""
        found: Buffers = {}
        if not is_whole(self._call, block):
            for name, like in zip(("grad_key", "grad_value"), self._like, strict=True):
                found[name] = _buffer((1, 1, block.keys.length, like.shape[3]), like)
        if self._mask is not None:
            found["grad_mask"] = _buffer(self._call.cut_bias(self._mask, block).shape, self._mask)
        return found

    def add(self, block: Block, made: Buffers) -> None:
        """Add the gradients of a block that is done."""
        if self._mask is not None:
            self._call.cut_bias(self._mask, block).add_(made["grad_mask"])
        if "grad_key" not in made:
            return
        head = self._call.key_heads(block).start
        place = block.entries.start, head
        if place not in self._heads:
            first = head * (self._call.heads // self._call.kv_heads)
            self._heads[place] = _HeadSum(self._like, first)
        rows = [made[name][0, 0] for name in ("grad_key", "grad_value")]
        self._heads[place].add(block, rows, self._call.n_queries)

    def store(self, grad_key: torch.Tensor, grad_value: torch.Tensor) -> None:
        """Put the sums of keys and values where they belong."""
        for (entry, head), found in self._heads.items():
            assert not found.early, "a block is missing"
            grad_key[entry, head], grad_value[entry, head] = found.both

    def store_mask(self, result: torch.Tensor, batch: tuple[int, ...]) -> None:
        """Put the mask's where it belongs, a tensor of the caller's shape; ``batch``: dimensions
        of the call."""
        assert self._mask is not None
        if self._mask.shape[0] == 1:
            result.copy_(self._mask.reshape(result.shape))
        else:
            every = self._mask.reshape(*batch, *self._mask.shape[1:])
            result.copy_(every.sum_to_size(result.shape))


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=state_dtype(like.dtype), device=like.device)


def _buffer(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    made = made_for(shape, state_dtype(like.dtype), like.device)
    # Its memory may have been a sum that is still being read; the worker would not wait for it.
    backend_of(made.device).synchronize(made.device)
    return made
