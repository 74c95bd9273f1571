"""A sharded pass where heads divide by the ranks: exchanged, computed whole, exchanged back.

A rank holds some rows of all heads; after the exchange it holds all rows of its share of the heads,
so nothing is merged and nothing added up. On a GPU it may compute them in two turns on two streams:
all messages are sent first, and while one turn is computed those of the next are on their way, and
the results of the one before. What came is kept for the backward in place of the shards, so only
the upstream gradient moves again.

In a message a token's heads lie together, one token after the other. So what comes from all ranks
is one tensor as it arrives, however long their shards are, in the layout (rows, batch, heads, dim)
that kernels read as it is, and what they return in that layout is a message without a copy. A
rank's own rows are copied, not sent, if they lie before or after all others'; those of a rank in
the middle go through the exchange, because a message cannot have a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed.calls import Calls, MaskGradients
from quorum_attention.execution.device.cuda import TwoStreams

# Into how many calls a rank's heads are cut. On one stream the end of each leaves most of the
# device idle for a while: on H200s that takes longer than what more calls hide of the messages.
_TURNS = 1
# On two streams the next one fills it: two calls were faster than one, and than three or four,
# where a rank has at least so many floating-point operations (about a millisecond).
_SIDE_BY_SIDE = 2
WORTH_IT = 5e11
_WORD = 16
# Of a tensor of the shard, some heads of each rank's share: [start, stop) within a share.
Part = tuple[torch.Tensor, tuple[int, int]]
# Tensors that a turn has made, and rows on their way back.
_Made = tuple[Sequence[torch.Tensor], "Sequence[ToRows]"]


class Turn(NamedTuple):
    """Heads that are computed together, [start, stop) within each rank's share."""

    heads: tuple[int, int]
    kv_heads: tuple[int, int]


def turns_of(kv_heads: int, shared: int, flops: float = 0.0) -> list[Turn]:
    """The turns of a rank's share.

    Args:
        kv_heads: key/value heads of the share.
        shared: query heads of each.
        flops: floating-point operations of a forward, where turns are computed on two streams.
    """
    count = min(_SIDE_BY_SIDE if flops >= WORTH_IT else _TURNS, kv_heads)
    edges = [kv_heads * turn // count for turn in range(count + 1)]
    return [Turn((low * shared, high * shared), (low, high)) for low, high in pairwise(edges)]


class Swap:
    """The exchange of heads among the ranks of a group, of shards of given lengths.

    The number of heads is a multiple of the number of ranks.

    Attributes:
        start, rows: this rank's shard.
        tokens: rows of all shards.
    """

    def __init__(self, group: dist.ProcessGroup, lengths: Sequence[int]) -> None:
        self.group, self._rank, self._ranks = group, group.rank(), len(lengths)
        edges, last = [0, *accumulate(lengths)], self._ranks - 1
        self.start, self.rows = edges[self._rank], lengths[self._rank]
        self.tokens = edges[-1]
        # The ranks that messages are for, [low, high), and their rows.
        low = 1 if self._rank == 0 else 0
        high = last if 0 < self._rank == last else self._ranks
        self._others, self._foreign = slice(low, high), slice(edges[low], edges[high])
        self._theirs = [n if low <= one < high else 0 for one, n in enumerate(lengths)]
        self._mine = [self.rows if low <= one < high else 0 for one in range(self._ranks)]

    def to_heads(self, parts: Sequence[Part]) -> ToHeads:
        """Send heads to the ranks whose share they are; those of this rank's share come.

        Args:
            parts: tensors (batch, all heads, rows of the shard, dim) of one dtype.
        """
        dtype, batch = parts[0][0].dtype, parts[0][0].shape[0]
        sizes = [(stop - start, t.shape[3]) for t, (start, stop) in parts]
        tensors = _in_words(*(tensor for tensor, _ in parts))
        by_token = [self._by_token(t, some) for t, (_, some) in zip(tensors, parts, strict=True)]
        width = sum(t.shape[3] * t.shape[4] for t in by_token)
        count = len(by_token[0][self._others])
        outbox = tensors[0].new_empty((count, self.rows, batch, width))
        inbox = tensors[0].new_empty((self.tokens, batch, width))
        _write(outbox, [t[self._others] for t in by_token])
        foreign = inbox[self._foreign]
        work = self._sent(foreign, outbox.flatten(0, 1), self._theirs, self._mine)
        if count < self._ranks:  # beside the transfer
            mine = [t[self._rank] for t in by_token]
            _write(inbox[self.start : self.start + self.rows], mine)
        return ToHeads(inbox.view(dtype), sizes, work, outbox)

    def to_rows(self, part: torch.Tensor, target: torch.Tensor, start: int) -> ToRows:
        """Send rows of heads back to the ranks whose shards they are of; write those that come.

        Args:
            part: (batch, heads of this rank's share, rows of all shards, dim).
            target: (batch, all heads, rows of the shard, dim), of the same dtype.
            start: where the part's heads begin within each rank's share.
        """
        message, target = _in_words(part.permute(2, 0, 1, 3).contiguous(), target)
        places = self._by_token(target, (start, start + part.shape[1]))
        others = places[self._others]
        inbox = message.new_empty((others.shape[0] * self.rows, *message.shape[1:]))
        work = self._sent(inbox, message[self._foreign], self._mine, self._theirs)
        own = places[self._rank] if len(others) < self._ranks else None
        return ToRows(inbox, others, work, message, own, self.start)

    def received_bytes(self, there: Sequence[torch.Tensor], back: Sequence[torch.Tensor]) -> int:
        """Bytes that this rank receives from others.

        Args:
            there, back: tensors of the shard, of which rows are sent to heads, and come back.
        """
        sent, returned = (
            sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in each)
            for each in (there, back)
        )
        foreign = (self.tokens - self.rows) * sent
        return (foreign + (self._ranks - 1) * self.rows * returned) // self._ranks

    def _by_token(self, tensor: torch.Tensor, some: tuple[int, int]) -> torch.Tensor:
        """Some heads of each rank's share: a view (ranks, rows, batch, heads, dim)."""
        shares = tensor.unflatten(1, (self._ranks, -1))[:, :, slice(*some)]
        by_token: torch.Tensor = shares.permute(1, 3, 0, 2, 4)
        return by_token

    def _sent(
        self, inbox: torch.Tensor, outbox: torch.Tensor, come: list[int], go: list[int]
    ) -> Any:
        if self._ranks == 1:
            return None
        return dist.all_to_all_single(inbox, outbox, come, go, group=self.group, async_op=True)


def _in_words(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors as such of words of 16 bytes, where all consist of them: a copy between layouts
    goes element by element, and takes as long for small ones as for large."""
    step = _WORD // tensors[0].element_size()
    for t in tensors:
        *outer, inner = t.stride()
        if inner != 1 or t.data_ptr() % _WORD:
            return tensors
        if any(n % step for n in (t.shape[-1], int(t.storage_offset()), *outer)):
            return tensors
    return [t.view(torch.complex128) for t in tensors]


def _write(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Write tensors (..., heads, dim) into a message (..., elements of a token)."""
    at = 0
    for part in parts:
        heads, dim = part.shape[-2:]
        message[..., at : at + heads * dim].unflatten(-1, (heads, dim)).copy_(part)
        at += heads * dim


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
    each = inbox.split([heads * dim for heads, dim in sizes], dim=-1)
    return [t.unflatten(-1, size).permute(1, 2, 0, 3) for t, size in zip(each, sizes, strict=True)]


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


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A call whose heads are exchanged, on one rank.

    Attributes:
        calls: how its attention calls are made.
        side_by_side: turns are computed on two streams.
    """

    calls: Calls
    turns: Sequence[Turn]
    side_by_side: bool

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Output of this rank's rows, and what the backward needs.

        Args:
            query: (batch, heads, rows, head_dim) of this rank's shard; key and value likewise.
        """
        swap, kept = Swap(self.calls.group, self.calls.sizes), list[torch.Tensor]()
        out = query.new_empty((*query.shape[:3], value.shape[3]))

        def computed(turn: Turn, now: ToHeads, _: Any) -> _Made:
            inputs = dict(zip(("query", "key", "value"), now.arrived(), strict=True))
            part, lse = self.calls.compute(inputs, *self._numbers(turn))
            if keep:
                kept.extend((now.inbox, part, lse))
            return [part, lse], [swap.to_rows(part, out, turn.heads[0])]

        sent = [[(query, t.heads), (key, t.kv_heads), (value, t.kv_heads)] for t in self.turns]
        self._in_turns(swap, sent, computed)
        if self.calls.report is not None:
            self.calls.report.forward_bytes = swap.received_bytes([query, key, value], [out])
        return out, kept

    def backward(
        self,
        grad_out: torch.Tensor,
        shapes: Sequence[torch.Size],
        saved: Sequence[torch.Tensor],
        of_mask: MaskGradients,
    ) -> list[torch.Tensor]:
        """The gradients of this rank's rows of query, key and value.

        Args:
            shapes: of the three.
            saved: what the forward returned.
            of_mask: to which the gradients of the mask's own tensors are added, of what is computed
                here.
        """
        swap = Swap(self.calls.group, self.calls.sizes)
        grads = [grad_out.new_empty(shape) for shape in shapes]

        def computed(turn: Turn, now: ToHeads, held: Sequence[torch.Tensor]) -> _Made:
            ranges = turn.heads, turn.kv_heads, turn.kv_heads
            sizes = [(b - a, grad.shape[3]) for (a, b), grad in zip(ranges, grads, strict=True)]
            three = opened(held[0], sizes)
            names = ("grad_out", "query", "key", "value", "out", "lse")
            inputs = dict(zip(names, (*now.arrived(), *three, *held[1:]), strict=True))
            made = self.calls.backward(inputs, *self._numbers(turn), of_mask)
            parts = zip(made, grads, ranges, strict=True)
            return [], [swap.to_rows(part, grad, start) for part, grad, (start, _) in parts]

        self._in_turns(swap, [[(grad_out, turn.heads)] for turn in self.turns], computed, saved)
        if self.calls.report is not None:
            self.calls.report.backward_bytes = swap.received_bytes([grad_out], grads)
        return grads

    def _in_turns(
        self,
        swap: Swap,
        sent: Sequence[Sequence[Part]],
        computed: Callable[[Turn, ToHeads, Sequence[torch.Tensor]], _Made],
        saved: Sequence[torch.Tensor] = (),
    ) -> None:
        """Send all parts to heads, compute turn by turn, and write the rows that come back.

        Args:
            sent: by turn.
            computed: of a turn, what came and what was saved of it: tensors it made, and rows on
                their way back.
            saved: three tensors of each turn, or none.
        """
        coming = [swap.to_heads(parts) for parts in sent]
        lanes, going = TwoStreams(sent[0][0][0].device, self.side_by_side), list[ToRows]()
        for number, (turn, now) in enumerate(zip(self.turns, coming, strict=True)):
            held = saved[3 * number : 3 * number + 3]
            lanes.reads(number, now.inbox, now.outbox, *held)
            with lanes.turn(number):
                made, back = computed(turn, now, held)
            lanes.leaves(*made, *(t for one in back for t in (one.inbox, one.message)))
            going += back
        lanes.meet()
        for one in going:
            one.written()

    def _numbers(self, turn: Turn) -> tuple[Interval, Interval]:
        """Heads and rows of a turn in the whole call."""
        first = self.calls.rank * (self.calls.whole.heads // len(self.calls.sizes))
        start, stop = turn.heads
        return Interval(first + start, first + stop), Interval(0, self.calls.whole.n_keys)


__all__ = ["Exchanged", "Swap", "Turn", "opened", "turns_of"]
