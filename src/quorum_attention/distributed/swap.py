"""Rows of all heads for all rows of some heads, and back: messages in which tokens come first.

A rank holds some rows of all heads. After the exchange it holds all rows of its share of the heads.
In a message a token's heads lie together, one token after the other; so what comes from all ranks
is one tensor as it arrives, however long their shards are, in the layout (rows, batch, heads, dim)
that kernels read as it is. What they return in that layout is a message without a copy, too.

A rank's own rows are copied, not sent, if they lie before or after all others'; those of a rank in
the middle go through the exchange, because a message cannot have a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

_WORD = 16
# Of a tensor of the shard, some heads of each rank's share: [start, stop) within a share.
Part = tuple[torch.Tensor, tuple[int, int]]


class Swap:
    """The exchange of heads among the ranks of a group, of shards of given lengths.

    The number of heads is a multiple of the number of ranks.

    Attributes:
        rank, ranks: of the group.
        start, rows: this rank's shard.
        tokens: rows of all shards.
    """

    def __init__(self, group: dist.ProcessGroup, lengths: Sequence[int]) -> None:
        self._group = group
        self.rank, self.ranks = group.rank(), len(lengths)
        edges = (0, *accumulate(lengths))
        self.rows, self.start, self.tokens = lengths[self.rank], edges[self.rank], edges[-1]
        low, high = 0, self.ranks
        if self.rank == 0:
            low = 1
        elif self.rank == self.ranks - 1:
            high -= 1
        # The ranks that messages are for, and their rows.
        self._low, self._high = low, high
        self._apart = high - low < self.ranks
        self._first, self._last = edges[low], edges[high]
        self._theirs = [n if low <= rank < high else 0 for rank, n in enumerate(lengths)]
        self._mine = [self.rows if low <= rank < high else 0 for rank in range(self.ranks)]

    def to_heads(self, parts: Sequence[Part]) -> ToHeads:
        """Send heads to the ranks whose share they are; those of this rank's share come.

        Args:
            parts: tensors (batch, all heads, rows of the shard, dim) of one dtype.
        """
        sizes = [(stop - start, tensor.shape[3]) for tensor, (start, stop) in parts]
        dtype = parts[0][0].dtype
        tensors = in_words([tensor for tensor, _ in parts])
        first = tensors[0]
        batch = first.shape[0]
        counts = [
            (stop - start, t.shape[3]) for t, (_, (start, stop)) in zip(tensors, parts, strict=True)
        ]
        width = sum(heads * dim for heads, dim in counts)
        inbox = first.new_empty((self.tokens, batch, width))
        outbox = first.new_empty(((self._high - self._low) * self.rows, batch, width))
        starts = [start for _, (start, _) in parts]
        if self._low < self._high:
            at = 0
            for tensor, start, (heads, dim) in zip(tensors, starts, counts, strict=True):
                room = _columns(outbox, 0, self.rows, self._high - self._low, at, heads, dim)
                room.copy_(self._by_token(tensor, self._low, self._high, start, heads))
                at += heads * dim
        work = self._sent(inbox[self._first : self._last], outbox, self._theirs, self._mine)
        # Beside the transfer:
        if self._apart:
            at = 0
            for tensor, start, (heads, dim) in zip(tensors, starts, counts, strict=True):
                room = _columns(inbox, self.start, self.rows, 1, at, heads, dim)
                room.copy_(self._by_token(tensor, self.rank, self.rank + 1, start, heads))
                at += heads * dim
        return ToHeads(inbox.view(dtype), sizes, work, outbox)

    def to_rows(self, part: torch.Tensor, target: torch.Tensor, start: int) -> ToRows:
        """Send rows of heads back to the ranks whose shards they are of; write those that come.

        Args:
            part: (batch, heads of this rank's share, rows of all shards, dim).
            target: (batch, all heads, rows of the shard, dim), of the same dtype.
            start: where the part's heads begin within each rank's share.
        """
        message = part.permute(2, 0, 1, 3).contiguous()
        message, target = in_words([message, target])
        _, batch, heads, dim = message.shape
        others = self._high - self._low
        inbox = message.new_empty((others * self.rows, batch, heads, dim))
        outbox = message[self._first : self._last]
        work = self._sent(inbox, outbox, self._mine, self._theirs)
        own = None
        if self._apart:
            own = self._by_token(target, self.rank, self.rank + 1, start, heads)[0]
        place = self._by_token(target, self._low, self._high, start, heads)
        return ToRows(inbox, place, work, message, own, self.start)

    def received_bytes(self, there: Sequence[torch.Tensor], back: Sequence[torch.Tensor]) -> int:
        """Bytes that this rank receives from others.

        Args:
            there, back: tensors of the shard, of which rows are sent to heads, and come back.
        """
        row = sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in there)
        returned = sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in back)
        foreign = (self.tokens - self.rows) * row
        return (foreign + (self.ranks - 1) * self.rows * returned) // self.ranks

    def _sent(
        self, inbox: torch.Tensor, outbox: torch.Tensor, come: list[int], go: list[int]
    ) -> Any:
        if self._low == self._high:
            return None
        return dist.all_to_all_single(inbox, outbox, come, go, group=self._group, async_op=True)

    def _by_token(
        self, tensor: torch.Tensor, low: int, high: int, start: int, heads: int
    ) -> torch.Tensor:
        """Heads of the shares of ranks [low, high): a view (ranks, rows, batch, heads, dim)."""
        batch, every, rows, dim = tensor.shape
        b, h, n, d = tensor.stride()
        share = every // self.ranks
        return tensor.as_strided(
            (high - low, rows, batch, heads, dim),
            (h * share, n, b, h, d),
            tensor.storage_offset() + (low * share + start) * h,
        )


def in_words(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The same tensors in words of 16 bytes, if all of them consist of such; views.

    A copy between layouts goes element by element, and takes as long for small ones as for large.
    """
    for tensor in tensors:
        step = _WORD // tensor.element_size()
        *outer, inner = tensor.stride()
        if inner != 1 or tensor.shape[-1] % step or tensor.data_ptr() % _WORD:
            return tensors
        if any(stride % step for stride in (*outer, tensor.storage_offset())):
            return tensors
    return [tensor.view(torch.complex128) for tensor in tensors]


def _columns(
    message: torch.Tensor, first: int, rows: int, ranks: int, at: int, heads: int, dim: int
) -> torch.Tensor:
    """Elements of each token of a message, from ``at`` on: (ranks, rows, batch, heads, dim)."""
    _, batch, width = message.shape
    token = batch * width
    return message.as_strided(
        (ranks, rows, batch, heads, dim),
        (rows * token, token, width, dim, 1),
        message.storage_offset() + first * token + at,
    )


@dataclass(slots=True)
class ToHeads:
    """Rows of this rank's heads, on their way.

    Attributes:
        inbox: (rows of all shards, batch, elements of a token).
        sizes: heads and dim of each tensor.
    """

    inbox: torch.Tensor
    sizes: Sequence[tuple[int, int]]
    work: Any
    outbox: torch.Tensor | None

    def arrived(self) -> list[torch.Tensor]:
        """Views (batch, heads, rows of all shards, dim) of the message that came."""
        if self.work is not None:
            self.work.wait()
        self.work = self.outbox = None
        return opened(self.inbox, self.sizes)


def opened(inbox: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The tensors of a message (rows, batch, elements of a token): (batch, heads, rows, dim)."""
    rows, batch, width = inbox.shape
    views, at = [], inbox.storage_offset()
    for heads, dim in sizes:
        shape, strides = (batch, heads, rows, dim), (width, dim, batch * width, 1)
        views.append(inbox.as_strided(shape, strides, at))
        at += heads * dim
    return views


@dataclass(slots=True)
class ToRows:
    """Rows of this rank's shard, on their way back.

    Attributes:
        place: where those of other ranks belong.
        message: what was sent, (rows of all shards, ...); its rows from ``start`` on are this
            rank's, and belong into ``own``, if they are not on their way as well.
    """

    inbox: torch.Tensor
    place: torch.Tensor
    work: Any
    message: torch.Tensor
    own: torch.Tensor | None
    start: int

    def written(self) -> None:
        """Write all of them where they belong; once."""
        if self.own is not None:
            self.own.copy_(self.message[self.start : self.start + len(self.own)])
        if self.work is not None:
            self.work.wait()
            self.place.copy_(self.inbox.view(self.place.shape))


__all__ = ["Part", "Swap", "ToHeads", "ToRows", "in_words", "opened"]
