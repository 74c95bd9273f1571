"""A sharded causal pass in which each rank begins with what it holds.

The triangles on the diagonal, of a rank's own rows and own keys, need no message: they are computed
while messages are on their way. What is left are rectangles, a later shard's rows against an
earlier shard's keys. Of each, the first half of the heads is computed by the rank that has the
keys, to which the rows come, and the second half by the rank that has the rows, to which keys and
values come. So shards of equal lengths make equal shares, and the statistics of the first half go
back while the rank that computed them has a triangle left.

Rows of several parts are merged. Parts are rounded as the kernel rounds its results; merging is in
fp32, and so is adding gradients up.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed.calls import Calls
from quorum_attention.distributed.exchange import Delivery, Parcel
from quorum_attention.distributed.peers import alive
from quorum_attention.distributed.watch import Watch
from quorum_attention.execution.device.two_streams import TwoStreams
from quorum_attention.execution.workload import state_dtype
from quorum_attention.kernels.first_derivative import first_derivative
from quorum_attention.kernels.merge import add_, merge_

# Some heads, and a tensor of them (batch, heads, rows, ...); or output and lse.
Part = tuple[Interval, torch.Tensor]
Statistics = tuple[Interval, torch.Tensor, torch.Tensor]


class Unit(NamedTuple):
    """One attention call of a rank: of its own rows and keys, or beside another rank's.

    Attributes:
        peer: this rank: its own triangle; a later one: that one's rows, own keys; an earlier one:
            that one's keys, own rows.
        heads: query heads.
    """

    peer: int
    heads: Interval


@dataclass(frozen=True, slots=True)
class LocalFirst:
    """A causal call on one rank.

    Attributes:
        lengths: rows of each rank.
        heads, kv_heads: of the call.
        calls: how its attention calls are made.
        side_by_side: they are computed on two streams.
    """

    _group: weakref.ref[dist.ProcessGroup]
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    calls: Calls
    side_by_side: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; a graph of autograd's, which a caller may keep, holds this."""
        return alive(self._group)

    @property
    def halves(self) -> tuple[Interval, Interval]:
        """Query heads of rectangles that are computed beside their keys, and beside their rows."""
        return Interval(0, self.heads // 2), Interval(self.heads // 2, self.heads)

    def kv_of(self, heads: Interval) -> Interval:
        """The key/value heads that query heads read."""
        share = self.heads // self.kv_heads
        return Interval(heads.start // share, -(-heads.stop // share))

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        here = self.group.rank()
        return [rank for rank in range(len(self.lengths)) if rank != here]

    def pairs(self, rank: int) -> Iterator[tuple[int, int]]:
        """Pairs of ranks (earlier, later) that one takes part in."""
        yield from ((earlier, rank) for earlier in range(rank))
        yield from ((rank, later) for later in range(rank + 1, len(self.lengths)))

    def forward_units(self, rank: int) -> tuple[list[Unit], list[Unit]]:
        """What a rank computes before results go back, and while they are on their way."""
        first, second = self.halves
        owns = [Unit(earlier, second) for earlier in range(rank)]
        serves = [Unit(later, first) for later in range(rank + 1, len(self.lengths))]
        if serves:
            return [Unit(rank, first), *owns, *serves], [Unit(rank, second)]
        # It sends nothing back. Its triangle is one call: where the others' parts are merged into.
        last = owns.pop()
        share = self.heads // self.kv_heads
        middle = (second.start + second.length // 2) // share * share
        if not second.start < middle < second.stop:
            return [Unit(rank, Interval(0, self.heads)), *owns, last], []
        low, high = Interval(second.start, middle), Interval(middle, second.stop)
        before = [Unit(rank, Interval(0, self.heads)), *owns, Unit(last.peer, low)]
        return before, [Unit(last.peer, high)]

    def backward_units(self, rank: int) -> tuple[list[Unit], list[Unit]]:
        """As ``forward_units``. Rectangles beside a rank's own rows need nothing that comes."""
        first, second = self.halves
        before = [Unit(earlier, second) for earlier in range(rank)]
        before.append(Unit(rank, first))
        before += [Unit(later, first) for later in range(rank + 1, len(self.lengths))]
        return before, [Unit(rank, second)]


def _some(tensor: torch.Tensor, heads: Interval) -> torch.Tensor:
    """A view of some heads."""
    return tensor.narrow(1, heads.start, heads.length)


class Mail:
    """Tensors on their way between the two ranks of each pair.

    Args:
        to_earlier, to_later: what goes to an earlier, and to a later rank: tensors like those, but
            for the number of rows.
        content: of this rank's messages, by the rank that gets them.
        mark: what the last rank sends the others with it; None: nothing.
        back: whether rows are those of who gets them; else of who sends them.
    """

    def __init__(
        self,
        call: LocalFirst,
        watch: Watch,
        to_earlier: Sequence[torch.Tensor],
        to_later: Sequence[torch.Tensor],
        content: Mapping[int, Sequence[torch.Tensor]],
        *,
        mark: int | None = None,
        back: bool = False,
    ) -> None:
        group = call.group
        here, parcels = group.rank(), []
        self._sources: list[int] = []
        for earlier, later in call.pairs(here):
            for source, target, likes in (
                (later, earlier, to_earlier), (earlier, later, to_later),
            ):  # fmt: skip
                rows = call.lengths[target if back else source]
                for number, like in enumerate(likes):
                    shape = (*like.shape[:2], rows, *like.shape[3:])
                    parcel = Parcel(source, target, shape, like.dtype)
                    if source == here:
                        parcel.content = content[target][number]
                    else:
                        self._sources.append(source)
                    parcels.append(parcel)
        device = (*to_earlier, *to_later)[0].device
        self._delivery = Delivery(parcels, group, device, watch, mark)
        self.received_bytes = self._delivery.received_bytes

    @property
    def messages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory that comes, and that is sent."""
        return self._delivery.inbox, self._delivery.outbox

    def arrived(self) -> dict[int, list[torch.Tensor]]:
        """What came, by the rank that sent it."""
        found: dict[int, list[torch.Tensor]] = {}
        for source, tensor in zip(self._sources, self._delivery.contents(), strict=True):
            found.setdefault(source, []).append(tensor)
        return found


def forward(
    call: LocalFirst,
    watch: Watch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Output and lse of this rank's rows, and what came for the backward.

    Args:
        watch: the pass.
        query: (batch, heads, rows, head_dim) of this rank's shard; key and value likewise.
    """
    here, (first, second) = call.group.rank(), call.halves
    kv = call.kv_of(second)
    rows, keys = [_some(query, first)], [_some(key, kv), _some(value, kv)]
    content = {peer: keys if peer > here else rows for peer in call.others}
    coming = Mail(call, watch, rows, keys, content, mark=watch.mark)
    lanes = TwoStreams(query.device, call.side_by_side)
    lanes.reads(1, *coming.messages)
    back: dict[int, Sequence[torch.Tensor]] = {}
    diagonal: list[Statistics] = []
    beside: list[Statistics] = []
    came: dict[int, list[torch.Tensor]] = {}

    def compute(unit: Unit) -> None:
        peer, heads = unit
        mine = call.kv_of(heads)
        three = [_some(query, heads), _some(key, mine), _some(value, mine)]
        if peer != here:
            came.update(coming.arrived())
        if peer > here:
            three[:1] = came[peer]
        elif peer < here:
            part = Interval(mine.start - kv.start, mine.stop - kv.start)
            three[1:] = [_some(t, part) for t in came[peer]]
        every = Interval(0, three[0].shape[2])
        q, k, v = three
        out, lse = call.calls.forward(watch, q, k, v, peer == here, heads, every)
        lanes.leaves(out, lse)
        if peer > here:
            back[peer] = out, lse
        else:
            (diagonal if peer == here else beside).append((heads, out, lse))

    before, after = call.forward_units(here)
    for number, unit in enumerate(before):
        with lanes.turn(number):
            compute(unit)
    state = state_dtype(query.dtype)
    like = value.new_empty((query.shape[0], first.length, 0, value.shape[3]))
    likes = [like, like[..., 0].to(state)]
    with lanes.turn(len(before) - 1):
        lanes.catch_up(len(before) - 1)
        going = Mail(call, watch, (), likes, back, back=True)
    lanes.leaves(*going.messages)
    for number, unit in enumerate(after, start=len(before)):
        with lanes.turn(number):
            compute(unit)
    watch.all_sent()
    lanes.meet()
    out, lse = _merged(call, diagonal, beside, going, here)
    watch.end()
    if call.calls.report is not None:
        call.calls.report.forward_bytes = coming.received_bytes + going.received_bytes
    return out, lse, [tensor for peer in call.others for tensor in came[peer]]


def _merged(
    call: LocalFirst,
    diagonal: Sequence[Statistics],
    beside: Sequence[Statistics],
    going: Mail,
    here: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of this rank's rows: of its triangle, and of the rectangles below."""
    _, outs, lses = zip(*diagonal, strict=True)
    out, lse = (ts[0] if len(ts) == 1 else torch.cat(ts, dim=1) for ts in (outs, lses))
    dtype = out.dtype
    if here > 1:
        # Rows of more than two parts are not rounded in between.
        out = out.to(lse.dtype)
    for heads, part, part_lse in beside:
        merge_(_some(out, heads), _some(lse, heads), part, part_lse)
    for part, part_lse in going.arrived().values():
        merge_(_some(out, call.halves[0]), _some(lse, call.halves[0]), part, part_lse)
    return out.to(dtype), lse


def backward(
    call: LocalFirst,
    watch: Watch,
    grad_out: torch.Tensor,
    three: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The gradients of this rank's rows of query, key and value.

    Args:
        watch: the pass.
        three: query, key and value of this rank's shard.
        results: out and lse of its rows.
        kept: what came for the forward.
    """
    here, (first, second) = call.group.rank(), call.halves
    query, key, value = three
    held = iter(kept)
    came = {peer: [next(held) for _ in range(1 if peer > here else 2)] for peer in call.others}
    by_row = [grad_out, *results]
    rows = [_some(tensor, first) for tensor in by_row]
    content = {peer: () if peer > here else rows for peer in call.others}
    coming = Mail(call, watch, rows, (), content, mark=watch.mark)
    lanes = TwoStreams(query.device, call.side_by_side)
    lanes.reads(1, *coming.messages, *by_row, *three, *kept)
    back: dict[int, Sequence[torch.Tensor]] = {}
    # Of query, key and value: of the triangle, and of the rectangles.
    base: tuple[list[Part], ...] = ([], [], [])
    more: tuple[list[Part], ...] = ([], [], [])

    def compute(unit: Unit) -> None:
        peer, heads = unit
        mine = call.kv_of(heads)
        upstream, out, lse = (_some(tensor, heads) for tensor in by_row)
        q, k, v = _some(query, heads), _some(key, mine), _some(value, mine)
        if peer > here:
            upstream, out, lse = coming.arrived()[peer]
            (q,) = came[peer]
        elif peer < here:
            k, v = came[peer]
        given, every = (upstream, q, k, v, out, lse), Interval(0, q.shape[2])
        made = call.calls.backward(watch, given, peer == here, heads, every, None)
        lanes.leaves(*made)
        parts = list(zip((heads, mine, mine), made, strict=True))
        if peer == here:
            for places, part in zip(base, parts, strict=True):
                places.append(part)
        elif peer > here:
            back[peer] = made[:1]
            more[1].append(parts[1])
            more[2].append(parts[2])
        else:
            back[peer] = made[1:]
            more[0].append(parts[0])

    before, after = call.backward_units(here)
    for number, unit in enumerate(before):
        with lanes.turn(number):
            compute(unit)
    with lanes.turn(len(before) - 1):
        lanes.catch_up(len(before) - 1)
        kv = call.kv_of(second)
        keys = [_some(key, kv), _some(value, kv)]
        going = Mail(call, watch, keys, [_some(query, first)], back, back=True)
    lanes.leaves(*going.messages)
    for number, unit in enumerate(after, start=len(before)):
        with lanes.turn(number):
            compute(unit)
    watch.all_sent()
    lanes.meet()
    coming.arrived()  # the last rank, to which nothing comes, has sent it by then
    for peer, parts in going.arrived().items():
        if peer < here:
            more[0].append((first, parts[0]))
        else:
            more[1].append((kv, parts[0]))
            more[2].append((kv, parts[1]))
    grads = [_summed(t, *of) for t, *of in zip(three, base, more, strict=True)]
    watch.end()
    if call.calls.report is not None:
        call.calls.report.backward_bytes = coming.received_bytes + going.received_bytes
    return grads


def _summed(like: torch.Tensor, base: Sequence[Part], more: Sequence[Part]) -> torch.Tensor:
    """The gradients of all heads: those of the triangle and of rectangles added up."""
    sums = torch.empty_like(like, memory_format=torch.contiguous_format)
    apart = base[0][0].stop <= base[1][0].start
    if apart and all(sum(heads == one for one, _ in more) <= 1 for heads, _ in base):
        # Of two numbers the sum is rounded once, whatever it is rounded to.
        other = dict(more)
        for heads, part in base:
            if heads in other:
                torch.add(part, other[heads], out=_some(sums, heads))
            else:
                _some(sums, heads).copy_(part)
        return sums
    total = torch.zeros(like.shape, dtype=state_dtype(like.dtype), device=like.device)
    for heads, part in (*base, *more):
        add_(_some(total, heads), part)
    return sums.copy_(total)


class ByShards(torch.autograd.Function):
    """Such a call, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: LocalFirst,
        watch: Watch,
    ) -> torch.Tensor:
        """Output of this rank's rows."""
        out, lse, kept = forward(call, watch, query, key, value)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(query, key, value, out, lse, *kept)
        ctx.call = call
        return out

    @staticmethod
    @first_derivative("quorum_attention.distributed.attention")
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        """The gradients of this rank's rows."""
        call: LocalFirst = ctx.call
        saved = call.calls.saved(ctx, call.group, grad_out.device)
        with call.calls.at_backward(call.group, grad_out.device) as watch:
            grad_out = grad_out.contiguous()
            made = backward(call, watch, grad_out, saved[:3], saved[3:5], saved[5:])
        return (*made, None, None)


__all__ = ["ByShards", "LocalFirst", "Mail", "Unit", "backward", "forward"]
