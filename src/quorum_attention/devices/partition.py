"""A call in blocks that devices compute independently of each other: heads first, then rows.

The key/value heads of all batch entries lie side by side, and each device has a stretch of them
that goes by its speed. Where a stretch ends inside a head, that head is cut between its query
heads, and then between rows, by work. The rows of a block see all of their keys, so that its output
is complete and nothing has to be merged. With dropout, which counts positions from the first row,
no rows are cut.

Only gradients of keys and values of a head that is cut, and that of a bias, are added up: in fp32
(fp64), rounded once, the rows of a gradient in the order of the blocks, whatever the order of
arrival.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.call.block import CallBlock, WholeCall
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.buffers import room
from quorum_attention.kernels.protocol import CallShape, state_dtype

Buffers = dict[str, torch.Tensor]
# Rows are cut at multiples of a kernel's tile.
_TILE = 128
# Float errors of a cut between two heads are smaller.
_CLOSE = 1e-6
# Blocks for each device where devices are not alike, so that others can take what one is too slow
# for. Heads are cut only where each device has fewer than this: gradients of their keys and values
# have to be added up.
_PIECES, _FEW_HEADS = 10, 4
# No order takes much longer: a device that is lost loses all of its order.
_LONGEST_SECONDS = 2.0


def block_of(shape: CallShape, entry: int, heads: Interval, rows: Interval) -> CallBlock:
    """Rows of query heads of a batch entry, with all the keys they see; the last rows have every
    key, so that the gradient of one that no row sees is written as well."""
    cut = shape.is_causal and not shape.dropout and rows.stop < shape.n_queries
    keys = min(rows.stop, shape.n_keys) if cut else shape.n_keys
    return CallBlock(Interval(entry, entry + 1), heads, rows, Interval(0, keys))


def is_whole(shape: CallShape, block: CallBlock) -> bool:
    """Whether no other block contributes to the gradients of a block's keys."""
    heads_are = not any(edge % shape.queries_per_key_head for edge in block.heads)
    return heads_are and block.rows == (0, shape.n_queries)


def pairs(shape: CallShape, block: CallBlock) -> int:
    """Query-key pairs of a block, as if nothing but later keys were masked."""
    low, high = map(shape.pairs_above, block.rows)
    return block.heads.length * (high - low)


def pieces_of(shape: CallShape, speeds: Mapping[int, float], *, alike: bool) -> int:
    """In how many pieces to cut what a device has.

    Args:
        speeds: of the devices, in pairs a second.
        alike: whether all are GPUs of one kind, and blocks take as long as their pairs say.
    """
    each = shape.batch * shape.kv_heads // len(speeds)
    if not alike:
        return _PIECES if each < _FEW_HEADS else min(_PIECES, each)
    # One call of many heads is quicker than several.
    seconds = shape.batch * shape.heads * shape.pairs / sum(speeds.values())
    return max(1, min(math.ceil(seconds / _LONGEST_SECONDS - 1e-3), each))


def partition(shape: CallShape, speeds: Sequence[float], pieces: int = 1) -> list[list[CallBlock]]:
    """The blocks of each device, in order; the same ones for calls of the same sizes.

    Args:
        speeds: of the devices, relative to each other.
        pieces: in how many each device's part is cut, so that others can take some.
    """
    heads = shape.batch * shape.kv_heads
    if not heads or not shape.n_queries:
        return [[] for _ in speeds]
    ends = [heads * at / sum(speeds) for at in accumulate(speeds, initial=0.0)]
    cuts = [round(at) if abs(at - round(at)) < _CLOSE else at for at in ends]
    return [_cut(shape, low, high, pieces) for low, high in pairwise(cuts)]


def _cut(shape: CallShape, low: float, high: float, pieces: int) -> list[CallBlock]:
    """The blocks between two shares of the work, as of ``_blocks``, in so many pieces."""
    inner = [low + (high - low) * n / pieces for n in range(1, pieces)]
    if high - low >= pieces:
        inner = [round(at) for at in inner]
    return [block for part in pairwise((low, *inner, high)) for block in _blocks(shape, *part)]


def _blocks(shape: CallShape, low: float, high: float) -> Iterator[CallBlock]:
    """The blocks between two shares of the work of all key/value heads, which are numbered through
    all batch entries: rows of the first and of the last query head, and all rows of those between,
    all query heads of some key/value heads or some of one's."""
    share, n = shape.queries_per_key_head, shape.n_queries
    (first, start), (last, stop) = (_point(shape, share * at) for at in (low, high))
    runs = [(first, first + 1, start, stop)]
    if first < last:
        runs[0] = first, first + 1, start, n if start else 0
        first += start > 0
        inner = {round_up(first, share), last // share * share}
        inner |= set(range(round_up(first, shape.heads), last, shape.heads))
        edges = sorted({first, last} | {edge for edge in inner if first < edge < last})
        runs += [(one, other, 0, n) for one, other in pairwise(edges)]
        runs.append((last, last + 1, 0, stop))
    for one, other, row, end in runs:
        if row < end:
            entry, head = divmod(one, shape.heads)
            yield block_of(shape, entry, Interval(head, head + other - one), Interval(row, end))


def _point(shape: CallShape, at: float) -> tuple[int, int]:
    """Query head and row at which the work of ``at`` query heads is done."""
    if shape.dropout:
        return round(at), 0
    head = math.floor(at + _CLOSE)
    return head, _row(shape, max(0.0, at - head))


def _row(shape: CallShape, part: float) -> int:
    """The row at which a part of a head's work is done, at the end of a tile."""
    n = shape.n_queries
    row = bisect_left(range(n), part * shape.pairs, key=shape.pairs_above)
    return min(n, round(row / _TILE) * _TILE)


class Sums:
    """The gradients of keys and values of heads that are cut, and that of a bias.

    Args:
        call: the whole call.
        key, value: (*batch, kv_heads, n_keys, width); the gradients are like them.
        bias: if its gradient is wanted.
    """

    def __init__(
        self,
        call: WholeCall,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._call, self._like = call, {"grad_key": key, "grad_value": value}
        self.bias = None if bias is None else _zeros(bias.shape, bias)
        # By batch entry and key/value head: its sums; query head and row of what is added next.
        self._totals: dict[tuple[int, int], Buffers] = {}
        self._next: dict[tuple[int, int], tuple[int, int]] = {}
        # What has come before its turn.
        self._early: dict[tuple[tuple[int, int], tuple[int, int]], tuple[CallBlock, Buffers]] = {}

    def buffers(self, block: CallBlock) -> Buffers:
        """Where a worker puts those of a block's gradients that are added up, by name; the others
        are results themselves."""
        likes: Buffers = {}
        if not is_whole(self._call.shape, block):
            likes = {n: self._call.cut(t, block, of_keys=True) for n, t in self._like.items()}
        if self.bias is not None:
            likes["grad_bias"] = self._call.cut_bias(self.bias, block)
        return {n: room(tuple(t.shape), state_dtype(t.dtype)) for n, t in likes.items()}

    def add(self, block: CallBlock, made: Buffers) -> None:
        """Add the gradients of a block that is done: those of a head in the order of query heads
        and rows. Blocks have some rows of one query head, or all of several."""
        if self.bias is not None:
            self._call.cut_bias(self.bias, block).add_(made["grad_bias"])
        if "grad_key" not in made:
            return
        shape, head = self._call.shape, (block.entries.start, self._call.key_heads(block).start)
        self._early[head, (block.heads.start, block.rows.start)] = block, made
        at = self._next.get(head, (head[1] * shape.queries_per_key_head, 0))
        while (found := self._early.pop((head, at), None)) is not None:
            (_, heads, rows, keys), parts = found
            if head not in self._totals:
                self._totals[head] = {n: _zeros(t.shape[-2:], t) for n, t in self._like.items()}
            for name, total in self._totals[head].items():
                total[: keys.length] += parts[name][0, 0]
            at = (heads.stop, 0) if rows.stop == shape.n_queries else (heads.start, rows.stop)
        self._next[head] = at

    def store(self, *grads: torch.Tensor) -> None:
        """Put the sums where they belong, the gradients of keys and values."""
        assert not self._early, "a block is missing"
        for (entry, head), totals in self._totals.items():
            share = self._call.shape.queries_per_key_head
            rows = Interval(0, self._call.shape.n_queries)
            block = block_of(
                self._call.shape, entry, Interval(head * share, (head + 1) * share), rows
            )
            for grad, total in zip(grads, totals.values(), strict=True):
                self._call.cut(grad, block, of_keys=True).copy_(total)


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=state_dtype(like.dtype), device="cpu")
