"""A sharded causal forward in which each rank begins with what it holds.

The triangles on the diagonal, of a rank's own rows and own keys, need no message: they are computed
while messages are on their way. What is left are rectangles, a later shard's rows against an
earlier shard's keys. Of each, the first half of the heads is computed by the rank that has the
keys, to which the rows come, and the second half by the rank that has the rows, to which keys and
values come. So shards of equal lengths make equal shares, and the statistics of the first half go
back while the rank that computed them has half of its triangle left.

Rows of several parts are merged in fp32. A part of 16 bits has been rounded by the kernel that made
it. An output is hardly less exact for that, but gradients would be, so these are left to the
exchange of heads (docs/distributed.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed.calls import Calls
from quorum_attention.distributed.exchange import Delivery, Parcel
from quorum_attention.distributed.peers import alive, begun
from quorum_attention.distributed.watch import Watch, sends_nothing
from quorum_attention.execution.device.cuda import TwoStreams
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.execution.workload import state_dtype
from quorum_attention.kernels.merge import merge_
from quorum_attention.repeated.whole import Whole

# Some heads, with output and lse of them (batch, heads, rows, ...).
Statistics = tuple[Interval, torch.Tensor, torch.Tensor]


class Unit(NamedTuple):
    """One attention call of a rank: of its own rows and keys, or beside another rank's.

    Attributes:
        peer: this rank: its own triangle; a later one: that one's rows, own keys; an earlier one:
            that one's keys, own rows.
        heads: query heads.
        kv: key/value heads.
    """

    peer: int
    heads: Interval
    kv: Interval


class Order(NamedTuple):
    """What a rank computes, and when.

    Attributes:
        first, second: query heads of rectangles that are computed beside their keys, and beside
            their rows; ``kv`` are the key/value heads of the second.
        before, after: results for others go back in between.
    """

    first: Interval
    second: Interval
    kv: Interval
    before: tuple[Unit, ...]
    after: tuple[Unit, ...]

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, rank: int, ranks: int, heads: int, kv_heads: int) -> Order:
        """That of one rank."""
        share, middle = heads // kv_heads, heads // 2

        def unit(peer: int, start: int, stop: int) -> Unit:
            kv = Interval(start // share, -(-stop // share))
            return Unit(peer, Interval(start, stop), kv)

        owns = [unit(earlier, middle, heads) for earlier in range(rank)]
        serves = [unit(later, 0, middle) for later in range(rank + 1, ranks)]
        if serves:
            before = [unit(rank, 0, middle), *owns, *serves]
            after = [unit(rank, middle, heads)]
        else:
            # It sends nothing back. Its triangle is one call, into which others' parts are merged.
            last = owns.pop()
            cut = (middle + (heads - middle) // 2) // share * share
            cut = cut if middle < cut < heads else heads
            before = [unit(rank, 0, heads), *owns, unit(last.peer, middle, cut)]
            after = [unit(last.peer, cut, heads)] if cut < heads else []
        second = unit(rank, middle, heads)
        return cls(Interval(0, middle), second.heads, second.kv, tuple(before), tuple(after))


@dataclass(slots=True)
class LocalFirst:
    """A causal call on one rank.

    Attributes:
        rank: of this process in the group.
        lengths: rows of each rank.
        heads, kv_heads: of the call.
        calls: how its attention calls are made.
        side_by_side: they are computed on two streams.
        held: what is known of its attention calls, where it is made again and again (``again.py``).
    """

    _group: weakref.ref[dist.ProcessGroup]
    rank: int
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    calls: Calls
    side_by_side: bool
    held: dict[Hashable, Whole] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The group."""
        return alive(self._group)

    @property
    def order(self) -> Order:
        """What this rank computes, and when."""
        return Order.of(self.rank, len(self.lengths), self.heads, self.kv_heads)


def _some(tensor: torch.Tensor, heads: Interval) -> torch.Tensor:
    """A view of some heads."""
    start, stop = heads
    return tensor if stop - start == tensor.shape[1] else tensor.narrow(1, start, stop - start)


# Of each other rank, whose number comes first, its tensors in a message: sizes, strides, start.
_Places = tuple[tuple[int, tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]], ...]


@lru_cache(maxsize=256)
def _places(
    lengths: tuple[int, ...], rank: int, sizes: tuple[tuple[int, int, int], ...]
) -> tuple[list[int], list[int], _Places]:
    """What goes to each rank, what comes from it, in elements; and where that lies.

    Args:
        sizes: batch, heads and dim of the queries that go to earlier ranks, of keys and of values
            that go to later ones.
    """
    row = [batch * heads * dim for batch, heads, dim in sizes]
    go, come, found = list[int](), list[int](), list[Any]()
    at = 0
    for peer, rows in enumerate(lengths):
        outward = row[:1] if peer < rank else row[1:] if peer > rank else []
        inward = sizes[1:] if peer < rank else sizes[:1] if peer > rank else ()
        go.append(lengths[rank] * sum(outward))
        places = []
        for batch, heads, dim in inward:
            shape, strides = (batch, heads, rows, dim), (heads * rows * dim, rows * dim, dim, 1)
            places.append((shape, strides, at))
            at += batch * heads * rows * dim
        come.append(at - sum(come))
        if places:
            found.append((peer, tuple(places)))
    return go, come, tuple(found)


class Inward:
    """Queries on their way to earlier ranks, keys and values to later ones: one message."""

    def __init__(
        self, call: LocalFirst, watch: Watch, queries: torch.Tensor, keys: Sequence[torch.Tensor]
    ) -> None:
        self._watch, tensors = watch, (queries, *keys)
        known = tuple([(t.shape[0], t.shape[1], t.shape[3]) for t in tensors])
        go, come, self._places = _places(call.lengths, call.rank, known)
        flat = [t.reshape(-1) for t in tensors]
        content = flat[:1] * call.rank
        for _ in range(call.rank + 1, len(call.lengths)):
            content += flat[1:]
        # What lies in one piece is sent from there.
        self.outbox = content[0] if len(content) == 1 else torch.cat(content)
        self.inbox = queries.new_empty(sum(come))
        group = call.group
        self._work: Any = None
        if self.outbox.numel() or not sends_nothing(group):
            messages = self.inbox, self.outbox, come, go
            work = dist.all_to_all_single(*messages, group=group, async_op=True)
            self._work = begun(group, work)
        self._waited = self._work is None
        self.received_bytes = self.inbox.nbytes

    def arrived(self) -> dict[int, list[torch.Tensor]]:
        """What came, by the rank that sent it: queries of later ranks, keys and values of earlier
        ones. On a GPU the current stream waits for it."""
        if not self._waited:
            self._watch.wait(self._work)
            self._waited = True
        elif self._work is not None and not on_host(self.inbox.device):
            self._work.wait()
        return {
            peer: [self.inbox.as_strided(*place) for place in places]
            for peer, places in self._places
        }


class Mail:
    """Tensors on their way between the two ranks of each pair, of any dtypes, with marks.

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
        here, parcels = call.rank, []
        self._sources: list[int] = []
        for peer in range(len(call.lengths)):
            if peer == here:
                continue
            earlier, later = sorted((here, peer))
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
        delivery = self._delivery = Delivery(parcels, call.group, device, watch, mark)
        self.inbox, self.outbox = delivery.inbox, delivery.outbox
        self.received_bytes = delivery.received_bytes

    def arrived(self) -> dict[int, list[torch.Tensor]]:
        """What came, by the rank that sent it. On a GPU the current stream waits for it."""
        found: dict[int, list[torch.Tensor]] = {}
        for source, tensor in zip(self._sources, self._delivery.contents(), strict=True):
            found.setdefault(source, []).append(tensor)
        return found


def without_gradients(
    call: LocalFirst, watch: Watch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """The output of this rank's rows.

    Args:
        watch: the pass.
        query: (batch, heads, rows, head_dim) of this rank's shard; key and value likewise.
    """
    here, (first, _, kv, before, after) = call.rank, call.order
    rows, keys = _some(query, first), (_some(key, kv), _some(value, kv))
    coming: Inward | Mail
    if watch.mark is None:
        # Kernels wait for the host until this message and the first of them are on their way.
        coming = Inward(call, watch, rows, keys)
    else:
        others = (peer for peer in range(len(call.lengths)) if peer != here)
        content = {peer: keys if peer > here else (rows,) for peer in others}
        coming = Mail(call, watch, (rows,), keys, content, mark=watch.mark)
    lanes = TwoStreams(query.device, call.side_by_side)
    lanes.reads(1, coming.inbox, coming.outbox)
    back: dict[int, Sequence[torch.Tensor]] = {}
    diagonal: list[Statistics] = []
    beside: list[Statistics] = []

    def compute(unit: Unit) -> None:
        peer, heads, mine = unit
        if peer > here:
            (q,), k, v = coming.arrived()[peer], _some(key, mine), _some(value, mine)
        elif peer == here:
            q, k, v = _some(query, heads), _some(key, mine), _some(value, mine)
        else:
            part = Interval(mine.start - kv.start, mine.stop - kv.start)
            q, (k, v) = _some(query, heads), [_some(t, part) for t in coming.arrived()[peer]]
        every = Interval(0, q.shape[2])
        out, lse = call.calls.forward(watch, q, k, v, peer == here, heads, every, held=call.held)
        lanes.leaves(out, lse)
        if peer > here:
            back[peer] = out, lse
        else:
            (diagonal if peer == here else beside).append((heads, out, lse))

    for number, unit in enumerate(before):
        with lanes.turn(number):
            compute(unit)
    like = value.new_empty((query.shape[0], first.length, 0, value.shape[3]))
    likes = like, like[..., 0].to(state_dtype(query.dtype))
    with lanes.turn(len(before) - 1):
        lanes.catch_up(len(before) - 1)
        going = Mail(call, watch, (), likes, back, back=True)
    lanes.leaves(going.inbox, going.outbox)
    for number, unit in enumerate(after, start=len(before)):
        with lanes.turn(number):
            compute(unit)
    watch.all_sent()
    lanes.meet()
    out = _merged(call, diagonal, beside, going)
    watch.end()
    if call.calls.report is not None:
        call.calls.report.forward_bytes = coming.received_bytes + going.received_bytes
    return out


def _merged(
    call: LocalFirst, diagonal: Sequence[Statistics], beside: Sequence[Statistics], going: Mail
) -> torch.Tensor:
    """Output of this rank's rows: of its triangle, and of the rectangles below."""
    _, outs, lses = zip(*diagonal, strict=True)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    came = going.arrived().values()
    if call.rank == 0:
        return out
    lse = lses[0] if len(lses) == 1 else torch.cat(lses, dim=1)
    dtype, first = out.dtype, call.order.first
    if call.rank > 1:
        # Rows of more than two parts are not rounded in between.
        out = out.to(lse.dtype)
    for heads, part, part_lse in beside:
        merge_(_some(out, heads), _some(lse, heads), part, part_lse)
    for part, part_lse in came:
        merge_(_some(out, first), _some(lse, first), part, part_lse)
    return out.to(dtype)


__all__ = ["LocalFirst", "Order", "without_gradients"]
