"""A sharded pass where heads divide by the ranks: exchanged, computed whole, exchanged back.

Nothing is merged and nothing added up: a rank has all rows of its heads. It may compute them in
turns of some heads each. Then all messages are sent first, and while one turn is computed those of
the next are on their way, and the results of the one before. On a GPU two turns are computed on two
streams. What came is kept for the backward in place of the shards, so only the upstream gradient
moves again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed.calls import Calls, Learned
from quorum_attention.distributed.swap import Part, Swap, ToRows, opened
from quorum_attention.distributed.watch import Watch
from quorum_attention.execution.device.cuda import TwoStreams
from quorum_attention.kernels.torch_private import first_derivative
from quorum_attention.repeated.whole import Whole

# Into how many calls a rank's heads are cut. On one stream the end of each leaves most of the
# device idle for a while: on H200s that takes longer than what more calls hide of the messages.
_TURNS = 1
# On two streams the next one fills it: two calls were faster than one, and than three or four,
# where a rank has at least so many floating-point operations (about a millisecond).
_SIDE_BY_SIDE = 2
WORTH_IT = 5e11


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


@dataclass(slots=True)
class Exchanged:
    """A call whose heads are exchanged, on one rank.

    Attributes:
        calls: how its attention calls are made.
        side_by_side: turns are computed on two streams.
        held: what is known of its attention calls, where it is made again and again (``again.py``).
    """

    swap: Swap
    turns: Sequence[Turn]
    calls: Calls
    is_causal: bool
    side_by_side: bool = False
    held: dict[Hashable, Whole] | None = None

    def numbers(self, turn: Turn, heads: int) -> tuple[Interval, Interval]:
        """Heads and rows of a turn in the whole call, which has so many heads."""
        first = self.swap.rank * (heads // self.swap.ranks)
        start, stop = turn.heads
        return Interval(first + start, first + stop), Interval(0, self.swap.tokens)


def forward(
    call: Exchanged,
    watch: Watch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keep: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output of this rank's rows, and what the backward needs.

    Args:
        query: (batch, heads, rows, head_dim) of this rank's shard; key and value likewise.
    """
    swap = call.swap
    coming = [swap.to_heads(_parts(turn, query, key, value), watch.mark) for turn in call.turns]
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    lanes, kept, going = TwoStreams(query.device, call.side_by_side), [], []
    for number, (turn, now) in enumerate(zip(call.turns, coming, strict=True)):
        lanes.reads(number, now.inbox, now.outbox)
        with lanes.turn(number):
            rows, keys, values = now.arrived(watch)
            numbers = call.numbers(turn, query.shape[1])
            part, lse = call.calls.forward(
                watch, rows, keys, values, call.is_causal, *numbers, held=call.held
            )
            going.append(swap.to_rows(part, out, turn.heads[0]))
        lanes.leaves(part, lse, going[-1].inbox, going[-1].message)
        if keep:
            kept += [now.inbox, part, lse]
    watch.all_sent()
    lanes.meet()
    for one in going:
        one.written(watch)
    watch.end()
    if call.calls.report is not None:
        call.calls.report.forward_bytes = swap.received_bytes([query, key, value], [out])
    return out, kept


def backward(
    call: Exchanged,
    watch: Watch,
    grad_out: torch.Tensor,
    shapes: Sequence[torch.Size],
    kept: Sequence[torch.Tensor],
    learned: Learned | None = None,
) -> list[torch.Tensor]:
    """The gradients of this rank's rows of query, key and value.

    Args:
        watch: the pass.
        shapes: of the three.
        kept: what the forward returned.
        learned: to which the gradients of the mask's own tensors are added, of what is computed
            here.
    """
    swap = call.swap
    coming = [swap.to_heads([(grad_out, turn.heads)], watch.mark) for turn in call.turns]
    grads = [grad_out.new_empty(shape) for shape in shapes]
    lanes, going = TwoStreams(grad_out.device, call.side_by_side), list[ToRows]()
    for number, (turn, now) in enumerate(zip(call.turns, coming, strict=True)):
        held = kept[3 * number : 3 * number + 3]
        lanes.reads(number, now.inbox, now.outbox, *held)
        with lanes.turn(number):
            (upstream,) = now.arrived(watch)
            back = _turned_back(call, watch, turn, (upstream, *held), grads, learned)
        for one in back:
            lanes.leaves(one.inbox, one.message)
        going += back
    watch.all_sent()
    lanes.meet()
    for one in going:
        one.written(watch)
    watch.end()
    if call.calls.report is not None:
        call.calls.report.backward_bytes = swap.received_bytes([grad_out], grads)
    return grads


def _turned_back(
    call: Exchanged,
    watch: Watch,
    turn: Turn,
    given: tuple[torch.Tensor, ...],
    grads: Sequence[torch.Tensor],
    learned: Learned | None,
) -> list[ToRows]:
    """The gradients of a turn, on their way to ``grads``.

    Args:
        given: upstream gradient, and what the forward kept of the turn.
    """
    upstream, inbox, part, lse = given
    (heads, kv_heads), head_dim = (_count(turn.heads), _count(turn.kv_heads)), grads[0].shape[3]
    sizes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, grads[2].shape[3])]
    query, key, value = opened(inbox, sizes)
    made = call.calls.backward(
        watch, (upstream, query, key, value, part, lse), call.is_causal,
        *call.numbers(turn, grads[0].shape[1]), learned,
    )  # fmt: skip
    starts = turn.heads[0], turn.kv_heads[0], turn.kv_heads[0]
    return [call.swap.to_rows(*each) for each in zip(made, grads, starts, strict=True)]


def _parts(
    turn: Turn, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[Part, ...]:
    return (query, turn.heads), (key, turn.kv_heads), (value, turn.kv_heads)


def _count(heads: tuple[int, int]) -> int:
    return heads[1] - heads[0]


class ByHeads(torch.autograd.Function):
    """A call whose heads are exchanged, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        call: Exchanged,
        watch: Watch,
    ) -> torch.Tensor:
        """Output of this rank's rows."""
        out, kept = forward(call, watch, query, key, value, any(ctx.needs_input_grad))
        ctx.save_for_backward(*kept, *call.calls.read())
        ctx.call, ctx.shapes = call, [t.shape for t in (query, key, value)]
        return out

    @staticmethod
    @first_derivative("quorum_attention.distributed.attention")
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        """The gradients of this rank's rows; of bias and sinks, of what is computed here."""
        call: Exchanged = ctx.call
        mask, saved = call.calls.mask, call.calls.saved(ctx, call.swap.group, grad_out.device)
        learned = Learned.of(mask, *ctx.needs_input_grad[3:5])
        with call.calls.at_backward(call.swap.group, grad_out.device) as watch:
            made = backward(call, watch, grad_out, ctx.shapes, saved, learned)
        of_mask = (None, None) if learned is None or mask is None else learned.found(mask)
        return (*made, *of_mask, None, None)


__all__ = ["ByHeads", "Exchanged", "Turn", "backward", "forward", "turns_of"]
