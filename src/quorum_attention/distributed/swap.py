"""Rows of all heads for all rows of some heads, and back: messages in which tokens come first.

A rank holds some rows of all heads. After the exchange it holds all rows of its share of the heads.
In a message a token's heads lie together, one token after the other; so what comes from all ranks
is one tensor as it arrives, however long their shards are, in the layout (rows, batch, heads, dim)
that kernels read as it is. What they return in that layout is a message without a copy, too.

A rank's own rows are copied, not sent, if they lie before or after all others'; those of a rank in
the middle go through the exchange, because a message cannot have a gap.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.distributed.marks import MARK_BYTES, read_mark, write_marks
from quorum_attention.distributed.peers import alive, begun
from quorum_attention.distributed.watch import Watch

_WORD = 16
# Of a tensor of the shard, some heads of each rank's share: [start, stop) within a share.
Part = tuple[torch.Tensor, tuple[int, int]]


class Edges(NamedTuple):
    """Where the rows of a rank's exchanges are, by the lengths of all shards.

    Attributes:
        start, rows: this rank's shard.
        tokens: rows of all shards.
        low, high: the ranks that messages are for.
        first, last: their rows, [first, last).
        theirs, mine: rows that come from each rank, and go to it.
    """

    start: int
    rows: int
    tokens: int
    low: int
    high: int
    first: int
    last: int
    theirs: list[int]
    mine: list[int]

    @property
    def others(self) -> int:
        """How many ranks messages are for."""
        return self.high - self.low

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, lengths: tuple[int, ...], rank: int) -> Edges:
        """Those of one rank; remembered, so not to be changed."""
        edges, ranks = (0, *accumulate(lengths)), len(lengths)
        low, high = 0, ranks
        if rank == 0:
            low = 1
        elif rank == ranks - 1:
            high -= 1
        rows = lengths[rank]
        theirs = [n if low <= one < high else 0 for one, n in enumerate(lengths)]
        mine = [rows if low <= one < high else 0 for one in range(ranks)]
        first, last = edges[low], edges[high]
        return cls(edges[rank], rows, edges[-1], low, high, first, last, theirs, mine)


class Swap:
    """The exchange of heads among the ranks of a group, of shards of given lengths.

    The number of heads is a multiple of the number of ranks.

    Attributes:
        rank, ranks: of the group.
        start, rows: this rank's shard.
        tokens: rows of all shards.
    """

    def __init__(self, group: dist.ProcessGroup, lengths: Sequence[int]) -> None:
        self._group = weakref.ref(group)
        self.rank, self.ranks = group.rank(), len(lengths)
        self._lengths = tuple(lengths)
        self._edges = edges = Edges.of(self._lengths, self.rank)
        self.start, self.rows, self.tokens = edges[:3]

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; a graph of autograd's, which a caller may keep, holds this."""
        return alive(self._group)

    def to_heads(self, parts: Sequence[Part], mark: int | None = None) -> ToHeads:
        """Send heads to the ranks whose share they are; those of this rank's share come.

        Args:
            parts: tensors (batch, all heads, rows of the shard, dim) of one dtype.
            mark: what the last rank sends the others at the end of its message; None: nothing.
        """
        # A device waits for the host here, so what follows from sizes alone is remembered.
        first, edges = parts[0][0], self._edges
        known = tuple([(*lies(tensor), some) for tensor, some in parts])
        marked = mark is not None and edges.others > 0
        packing = _packing(self._lengths, self.rank, first.element_size(), known, marked)
        tensors = [tensor for tensor, _ in parts]
        if packing.in_words:
            tensors = [tensor.view(torch.complex128) for tensor in tensors]
        inbox = tensors[0].new_empty(packing.inbox)
        outbox = tensors[0].new_empty(packing.outbox)
        for tensor, copy in zip(tensors, packing.sent, strict=False):
            copy.of(tensor, outbox)
        theirs, mine, got = edges.theirs, edges.mine, inbox[edges.first : edges.last]
        if packing.extra:
            assert mark is not None
            if self.rank == self.ranks - 1:
                write_marks(outbox, edges.others, mark)
                mine = [rows + packing.extra for rows in mine[:-1]] + mine[-1:]
            else:
                theirs = [*theirs[:-1], theirs[-1] + packing.extra]
                got = inbox[edges.first :]
        work = self._sent(got, outbox, theirs, mine)
        # Beside the transfer:
        for tensor, copy in zip(tensors, packing.own, strict=False):
            copy.of(tensor, inbox)
        inbox, tail = inbox.view(first.dtype), None
        if packing.extra and self.rank < self.ranks - 1:
            inbox, tail = inbox[: self.tokens], inbox[self.tokens :]
        return ToHeads(inbox, packing.sizes, work, outbox, tail)

    def to_rows(self, part: torch.Tensor, target: torch.Tensor, start: int) -> ToRows:
        """Send rows of heads back to the ranks whose shards they are of; write those that come.

        Args:
            part: (batch, heads of this rank's share, rows of all shards, dim).
            target: (batch, all heads, rows of the shard, dim), of the same dtype.
            start: where the part's heads begin within each rank's share.
        """
        message = part.permute(2, 0, 1, 3).contiguous()
        known, size = (lies(message), lies(target)), message.element_size()
        if in_words(known, size):
            message, target = message.view(torch.complex128), target.view(torch.complex128)
        _, batch, heads, dim = message.shape
        edges = self._edges
        inbox = message.new_empty((edges.others * self.rows, batch, heads, dim))
        outbox = message[edges.first : edges.last]
        work = self._sent(inbox, outbox, edges.mine, edges.theirs)
        sizes = (target.shape, target.stride(), (start, start + heads))
        own = None
        if edges.others < self.ranks:
            view = _by_token(*sizes, self.ranks, self.rank, self.rank + 1)
            own = view.of(target)[0]
        place = _by_token(*sizes, self.ranks, edges.low, edges.high).of(target)
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
        if not self._edges.others:
            return None
        work = dist.all_to_all_single(inbox, outbox, come, go, group=self.group, async_op=True)
        return begun(self.group, work)


class View(NamedTuple):
    """A view of a tensor: sizes, strides, and elements from its first on."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of ``tensor``."""
        return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset() + self.offset)


class Copy(NamedTuple):
    """Some heads of a tensor into a message."""

    source: View
    target: View

    def of(self, tensor: torch.Tensor, message: torch.Tensor) -> None:
        """Copy them."""
        self.target.of(message).copy_(self.source.of(tensor))


class Packing(NamedTuple):
    """How tensors of the shard become a message.

    Attributes:
        in_words: whether tensors and message are seen as words of 16 bytes.
        sizes: heads and dim of each tensor, in elements.
        extra: rows at the end of each of the last rank's messages, for a mark.
        inbox, outbox: sizes of the messages, (rows, batch, elements or words of a token).
        sent: into the outbox; none where there is nobody to send to.
        own: this rank's rows, into the inbox; none where they are sent as well.
    """

    in_words: bool
    sizes: tuple[tuple[int, int], ...]
    extra: int
    inbox: tuple[int, int, int]
    outbox: tuple[int, int, int]
    sent: tuple[Copy, ...]
    own: tuple[Copy, ...]


# Sizes, strides, and whether the tensor begins where a word does, in memory and in its storage.
Lies = tuple[tuple[int, ...], tuple[int, ...], bool]


def lies(tensor: torch.Tensor) -> Lies:
    """What ``in_words`` has to know of a tensor."""
    begins = (tensor.data_ptr() | int(tensor.storage_offset()) * tensor.element_size()) % _WORD == 0
    return tensor.shape, tensor.stride(), begins


@lru_cache(maxsize=512)
def in_words(tensors: tuple[Lies, ...], element_size: int) -> bool:
    """Whether all tensors consist of words of 16 bytes, and so can be seen as tensors of such.

    A copy between layouts goes element by element, and takes as long for small ones as for large.
    """
    step = _WORD // element_size
    for shape, (*outer, inner), begins in tensors:
        if not begins or inner != 1 or shape[-1] % step or any(one % step for one in outer):
            return False
    return True


@lru_cache(maxsize=512)
def _packing(
    lengths: tuple[int, ...],
    rank: int,
    element_size: int,
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], bool, tuple[int, int]], ...],
    marked: bool,
) -> Packing:
    """The packing of ``Swap.to_heads``.

    Args:
        parts: of each tensor, what ``lies`` says, and its heads.
        marked: whether the last rank's messages end with a mark.
    """
    edges, ranks, batch = Edges.of(lengths, rank), len(lengths), parts[0][0][0]
    words = in_words(tuple([part[:3] for part in parts]), element_size)
    step = _WORD // element_size if words else 1
    each = [((stop - start), shape[3]) for shape, _, _, (start, stop) in parts]
    width = sum(heads * dim for heads, dim in each) // step
    row_bytes = batch * width * step * element_size
    extra = -(-MARK_BYTES // row_bytes) if marked and row_bytes else 0
    # Rows of a message, and of what comes.
    length = edges.rows + (extra if rank == ranks - 1 else 0)
    come = edges.tokens + (extra if rank < ranks - 1 else 0)
    at, sent, own = 0, [], []
    for (shape, stride, _, some), (heads, dim) in zip(parts, each, strict=True):
        if words:
            shape, stride, dim = _of_words(shape, stride, step)
        token = batch * width
        strides = (length * token, token, width, dim, 1)
        if edges.others:
            source = _by_token(shape, stride, some, ranks, edges.low, edges.high)
            room = View((edges.others, edges.rows, batch, heads, dim), strides, at)
            sent.append(Copy(source, room))
        if edges.others < ranks:
            source = _by_token(shape, stride, some, ranks, rank, rank + 1)
            room = View((1, edges.rows, batch, heads, dim), strides, edges.start * token + at)
            own.append(Copy(source, room))
        at += heads * dim
    inbox, outbox = (come, batch, width), (edges.others * length, batch, width)
    return Packing(words, tuple(each), extra, inbox, outbox, tuple(sent), tuple(own))


def _of_words(
    shape: tuple[int, ...], stride: tuple[int, ...], step: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Sizes, strides and dim in words of ``step`` elements."""
    dim = shape[3] // step
    return (*shape[:3], dim), (*(n // step for n in stride[:3]), 1), dim


@lru_cache(maxsize=512)
def _by_token(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    some: tuple[int, int],
    ranks: int,
    low: int,
    high: int,
) -> View:
    """Some heads of the shares of ranks [low, high): (ranks, rows, batch, heads, dim).

    Args:
        shape, stride: of the tensor (batch, all heads, rows, dim).
    """
    batch, every, rows, dim = shape
    b, h, n, d = stride
    share = every // ranks
    sizes = (high - low, rows, batch, some[1] - some[0], dim)
    return View(sizes, (h * share, n, b, h, d), (low * share + some[0]) * h)


@dataclass(slots=True)
class ToHeads:
    """Rows of this rank's heads, on their way.

    Attributes:
        inbox: (rows of all shards, batch, elements of a token).
        sizes: heads and dim of each tensor.
        tail: rows that end with the last rank's mark; None: it sent none.
    """

    inbox: torch.Tensor
    sizes: Sequence[tuple[int, int]]
    work: Any
    outbox: torch.Tensor | None
    tail: torch.Tensor | None = None

    def arrived(self, watch: Watch) -> list[torch.Tensor]:
        """Views (batch, heads, rows of all shards, dim) of the message that came.

        Raises:
            ValueError: it is of another call.
        """
        if self.work is not None:
            watch.wait(self.work)
        if self.tail is not None:
            watch.check(read_mark(self.tail))
        self.work = self.outbox = self.tail = None
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

    def written(self, watch: Watch) -> None:
        """Write all of them where they belong; once."""
        if self.own is not None:
            self.own.copy_(self.message[self.start : self.start + len(self.own)])
        if self.work is not None:
            watch.wait(self.work)
            self.place.copy_(self.inbox.view(self.place.shape))


__all__ = ["Part", "Swap", "ToHeads", "ToRows", "opened"]
