"""``distributed.attention``: each rank gives its rows of the sequence, and gets their results."""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.call.dropout import checked_dropout
from quorum_attention.call.options import Written, options_of
from quorum_attention.call.settings import filled
from quorum_attention.call.transforms import is_followed, refuse_learned
from quorum_attention.counts import real_number, shown, switch
from quorum_attention.distributed import whole_heads
from quorum_attention.distributed.agreement import Said, agreed, check_shard, refuse
from quorum_attention.distributed.assignment import (
    Assignment,
    Sequences,
    forward_bytes,
)
from quorum_attention.distributed.calls import Calls, Learned, kernel_of_parts
from quorum_attention.distributed.local_first import LocalFirst, without_gradients
from quorum_attention.distributed.masks import Shards, checked_mask, whole_mask
from quorum_attention.distributed.peers import Peers, member_of
from quorum_attention.distributed.report import ShardedReport
from quorum_attention.distributed.run import Sharded, backward, forward
from quorum_attention.distributed.swap import Swap
from quorum_attention.distributed.watch import Watch, in_host_memory
from quorum_attention.distributed.ways import choose, hides_more, local_first
from quorum_attention.distributed.whole_heads import ByHeads, Exchanged, Turn, turns_of
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.kernels.dropout import LARGEST_SEED
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.torch_private import first_derivative, uncompiled
from quorum_attention.mask import Mask
from quorum_attention.repeated import like

# Inputs are kept for the backward where they take at most this much of what the shards take.
_KEPT_SHARE = 1.25
_AUTO = "auto"
# 16-bit calls of so few pairs are computed in fp32: on one device they get an exact delta
# (kernels/small_gradients.py), which needs whole rows.
_WIDENED_PAIRS = 1 << 16
# Dtypes whose partial results may be rounded as the kernel rounds them. (In fp32 computing takes so
# long that little is to be hidden.)
_LOCAL_FIRST = (torch.bfloat16, torch.float16)


@uncompiled
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | Mask | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    lengths: Sequence[int] | str | None = None,
    budget: int | str | None = None,
    depth: int | str = "auto",
    kernel: str | InnerKernel = "auto",
    report: ShardedReport | None = None,
) -> torch.Tensor:
    """Exact attention over a sequence whose tokens are sharded over the ranks of a group.

    All ranks call it together, in the same order, and call the backward of its result together.
    Each gives its contiguous shard, in the order of the ranks; shards may have any lengths, also 0,
    and the group any number of ranks. Which rank computes which pairs is decided by counted bytes
    among ways that share the work evenly: heads are exchanged, keys and values are moved, tasks of
    a cyclic quorum set are computed, or heads are exchanged among groups of ranks that do one of
    the others (``distributed/ways.py``). Partial results travel and are added up in fp32 (fp64 for
    fp64 inputs). On GPUs a causal forward without gradients may begin with each rank's own rows and
    keys; there parts of 16 bits travel as kernels round them.

    Args:
        query: (..., heads, rows, head_dim): this rank's rows; fp16, bf16, fp32 or fp64, on the
            device of the group's backend (NCCL: CUDA; Gloo: CPU).
        key: (..., kv_heads, rows, head_dim), value: (..., kv_heads, rows, value_dim): the same
            rows. Batch dimensions, heads and dtype are the same on all ranks.
        attn_mask: a ``Mask`` of the whole sequence, the same on all ranks. Ids of documents and
            paddings may be of this rank's rows only; then they are gathered. Or a tensor that
            broadcasts to (..., heads, tokens, tokens) of the whole call. Under a mask whole rows
            are given to ranks, with all keys. The gradients of ``sinks`` and of an additive tensor
            are of what this rank computes; the sum over the ranks is the whole.
        group: the process group; None is the default one.
        is_causal: token i of the whole sequence sees tokens j <= i.
        scale: of the scores; None is head_dim ** -0.5.
        enable_gqa: allow fewer key/value heads than query heads.
        dropout_p, dropout_seed: as in ``quorum_attention.attention``: with the same seed on all
            ranks the same pairs are dropped as on one device. None: each rank draws a seed for what
            it computes. With dropout whole heads are given to ranks.
        lengths: rows of every rank, if they are known, or "equal" if all have as many as this one:
            else they are gathered first. The host waits for that, and ranks that do not agree on
            sizes, dtype or options raise. With ``lengths`` it waits the first time that sizes and
            options are these, and then no more.
        budget, depth, kernel: as in ``quorum_attention.attention``, for each rank by itself: every
        part that a rank computes recovers from a lack of memory on its own. What the rows of a part
            take that are gathered from other ranks comes on top of the budget.
        report: a ``ShardedReport`` to fill with what this rank did.

    Returns:
        (..., heads, rows, value_dim): the result for this rank's rows.

    Raises:
        TypeError, ValueError: arguments that do not fit, also among ranks.
        RuntimeError: there is no process group; or another rank has failed, with its number, its
            error, and whether the group can be used again. Errors of ``quorum_attention.attention``
            come through on the rank that has them. On GPUs the host does not wait for others: they
            get NaN from a rank that failed (docs/distributed.md).
    """
    group = member_of(group)
    name = None
    if (
        budget is None and depth is _AUTO and kernel is _AUTO and report is None
        and attn_mask is None and dropout_seed is None and type(dropout_p) is float
        and dropout_p == 0.0 and lengths is not None
    ):  # fmt: skip
        name = _alike(query, key, value, is_causal, scale, enable_gqa, lengths)
        ready: _Ready | None = None if name is None else Peers.of(group).ready.get(name)
        if ready is not None:
            with Watch(group, ready.on_host) as watch:
                watch.knows(ready.what, ready.mark)
                return _met(ready.call, (query, key, value), watch)
    asked = Written(budget, None, depth, kernel)
    with Watch(group, in_host_memory(query)) as watch:
        try:
            check_shard(query, key, value, switch(enable_gqa, "enable_gqa"))
            causal = switch(is_causal, "is_causal")
            factor = None if scale is None else real_number(scale, "scale")
            mask = checked_mask(attn_mask)
            p, seed = checked_dropout(dropout_p, dropout_seed, draws=True)
            asked = _checked(asked, report, query, key, value)
        except Exception:
            refuse(group, lengths, watch)
            raise
        kind, inputs, dtype = query.device.type, (query, key, value), query.dtype
        cast = torch.is_autocast_enabled(kind) and dtype != torch.float64
        if cast:
            dtype = torch.get_autocast_dtype(kind)
        records = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        said = Said(query, key, value, dtype, causal, factor, mask, (p, seed), records)
        sizes, agreed_on, mark = agreed(group, said, lengths, watch)
        if mask is not None:
            batch_shape = query.shape[:-3]
            shards = Shards(group, sizes, batch_shape, query.shape[-3], query.device)
            mask = whole_mask(mask, shards, watch)
        whole = (query.shape[-3], sum(sizes))
        calls = Calls(factor, asked, whole, report, mask, _dropout(p, seed), agreed_on, mark)
        if not cast:
            like_this = name if mark is not None else None
            return _computed(inputs, group, watch, sizes, causal, calls, records, like_this)
        with torch.autocast(kind, enabled=False):
            narrowed = [t.to(dtype) for t in inputs]
            return _computed(narrowed, group, watch, sizes, causal, calls, records)


class _Ready(NamedTuple):
    """A call whose heads are exchanged, or the like, without a mask: all that precedes messages.

    Attributes:
        call: how tensors meet.
        what, mark: what the ranks have agreed on, and a number of it.
        on_host: whether tensors are in host memory.
    """

    call: Exchanged | LocalFirst
    what: Hashable
    mark: int
    on_host: bool


def _alike(
    query: Any, key: Any, value: Any, is_causal: Any, scale: Any, enable_gqa: Any, lengths: Any
) -> Hashable | None:
    """What a call is looked up by of which nothing is asked but attention; calls of one name differ
    in their numbers only. None: it is looked at anew."""
    if type(lengths) is not str:
        if type(lengths) is not tuple and type(lengths) is not list:
            return None
        for number in lengths:
            if type(number) is not int:
                return None
        lengths = tuple(lengths)
    found = like(query, key, value, None, is_causal, scale, enable_gqa)
    # With the rows of keys, which may be rounded up there.
    return None if found is None else (found, lengths, key.shape[2])


def _met(
    call: Exchanged | LocalFirst, inputs: Sequence[torch.Tensor], watch: Watch
) -> torch.Tensor:
    """The result of a call without a mask."""
    if isinstance(call, LocalFirst):
        with torch.no_grad():
            return without_gradients(call, watch, *inputs)
    out: torch.Tensor
    if not torch.is_grad_enabled():
        query, key, value = inputs
        return whole_heads.forward(call, watch, query, key, value, keep=False)[0]
    out = ByHeads.apply(*inputs, None, None, call, watch)  # type: ignore[no-untyped-call]
    return out


def _checked(
    asked: Written, report: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Written:
    """The options, with the kernel that now has the name asked for. Refuses what makes no sense,
    before other ranks wait for this one.

    Raises:
        TypeError, ValueError, NotImplementedError: an option makes none, by name.
    """
    if report is not None and not isinstance(report, ShardedReport):
        raise TypeError(f"report must be a distributed.ShardedReport, got {shown(report)}")
    wanted = filled(asked)
    if wanted.says_nothing:
        return asked
    device = options_of(wanted, query.device).device
    if wanted.kernel == "auto":
        return asked
    kernel = kernel_of_parts(wanted.kernel)
    if is_followed():
        refuse_learned(kernel, query, key, value, device)
    return asked._replace(kernel=kernel)


def _computed(
    inputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    watch: Watch,
    sizes: tuple[int, ...],
    causal: bool,
    calls: Calls,
    records: bool,
    name: Hashable | None = None,
) -> torch.Tensor:
    """The result of a call that has been checked; it is remembered as ``name``."""
    query, key, value = inputs
    mask, shape = calls.mask, query.shape
    units: Literal["pairs", "rows", "heads"] = "pairs"
    if mask is not None or calls.dropout is not None:
        units = "rows" if calls.dropout is None else "heads"
    leans = causal or (mask is not None and bool(mask.causal))
    flat: Sequence[torch.Tensor] = inputs
    if len(shape) != 4:
        batch = math.prod(shape[:-3])
        flat = [t.reshape(batch, *t.shape[-3:]) for t in inputs]
    aside = not on_host(query.device) and units == "pairs"
    decided = _decided(
        sizes, shape, key.shape[-3], value.shape[-1], query.dtype, leans, units, aside, records
    )
    if decided.widened:
        flat = [t.float() for t in flat]
    report = calls.report
    if report is not None:
        _fill(report, decided, group.rank())
    bias = sinks = None
    if mask is not None:
        sinks = mask.sinks
        bias = mask.bias if mask.bias is not None and mask.bias.requires_grad else None
    out: torch.Tensor
    call: Exchanged | LocalFirst | None = None
    if decided.assignment.local_first:
        there = weakref.ref(group), group.rank(), sizes, shape[-3], key.shape[-3]
        call = LocalFirst(*there, calls, aside and calls.unlimited)
    elif decided.assignment.whole_heads:
        side_by_side = aside and calls.unlimited
        call = Exchanged(Swap(group, sizes), decided.turns, calls, causal, side_by_side)
    if name is not None and call is not None and not decided.widened and flat is inputs:
        # What is known of its attention calls is held as well.
        call.held = {}
        assert calls.mark is not None
        ready = _Ready(call, (calls.name, None), calls.mark, in_host_memory(query))
        Peers.of(group).ready[name] = ready
    if call is not None and mask is None:
        out = _met(call, flat, watch)
    elif isinstance(call, Exchanged):
        out = ByHeads.apply(*flat, bias, sinks, call, watch)  # type: ignore[no-untyped-call]
    else:
        if causal and units != "pairs":
            # Of some rows of a head: causal then is a matter of the mask, which knows where.
            lower = Mask(causal=True)
            calls = replace(calls, mask=lower if mask is None else mask & lower)
        calls = replace(calls, partial=units == "pairs")
        rows = Sharded(decided.assignment, weakref.ref(group), calls, decided.kept)
        out = _Attention.apply(*flat, bias, sinks, rows, watch)  # type: ignore[no-untyped-call]
    if decided.widened:
        out = out.to(query.dtype)
    return out if len(shape) == 4 else out.reshape(*shape[:-1], value.shape[-1])


def _dropout(p: float, seed: int | None) -> tuple[float, int] | None:
    if p == 0.0:
        return None
    return p, int(torch.randint(LARGEST_SEED, (), device="cpu")) if seed is None else seed


class _Decided(NamedTuple):
    """How a call is shared.

    Attributes:
        kept: whether its inputs stay where they were computed with until the backward.
        most_bytes: received in a forward by the rank that receives most, of one batch entry.
        widened: whether it is computed in fp32.
        turns: of each rank; none where heads are not exchanged whole.
    """

    assignment: Assignment
    kept: bool
    most_bytes: int
    widened: bool
    turns: list[Turn]


@lru_cache(maxsize=256)
def _decided(
    lengths: tuple[int, ...],
    query: torch.Size,
    kv_heads: int,
    value_dim: int,
    dtype: torch.dtype,
    leans: bool,
    units: Literal["pairs", "rows", "heads"],
    aside: bool,
    records: bool,
) -> _Decided:
    """Of sizes alone, so all ranks decide the same; budgets may differ.

    Args:
        aside: turns may be computed on two streams.
        records: gradients are recorded.
    """
    of = Sequences((0, *accumulate(lengths)), query[-3], kv_heads, leans, units)
    batch, head_dim = math.prod(query[:-3]), query[-1]
    pairs = batch * of.heads * of.tokens**2
    widened = dtype.itemsize == 2 and pairs <= _WIDENED_PAIRS
    element = 4 if widened else dtype.itemsize
    state = max(4, element)
    sizes = forward_bytes(head_dim, value_dim, element, state)
    pair_flops = 2.0 * (head_dim + value_dim)
    assignment = choose(of, sizes, pair_flops)
    turns: list[Turn] = []
    if assignment.whole_heads:
        # The log-sum-exp stays where it was computed.
        alone = forward_bytes(head_dim, value_dim, element, 0)
        flops = batch * of.pairs / of.ranks * pair_flops if aside else 0.0
        turns = turns_of(kv_heads // of.ranks, of.share, flops)
        # Not where gradients are wanted: those of two ranks' parts are rounded once more.
        rounded = dtype in _LOCAL_FIRST and not records
        local = local_first(of) if rounded and flops >= whole_heads.WORTH_IT else None
        if local is not None and hides_more(
            of, assignment.most_received(alone), len(turns), value_dim * element, pair_flops
        ):
            # Parts travel as the kernel has rounded them.
            rows = sizes.query._replace(partial=sizes.query.alone)
            most = local.most_received(sizes._replace(query=rows))
            return _Decided(local, True, most, widened, [])
        sizes = alone
    complete = all(p.alone for p in assignment.query_pieces)
    # Vectors of all ranks, as they are gathered and as they lie in the shards.
    gathered = _vectors(assignment.query_pieces), _vectors(assignment.key_pieces)
    own = of.tokens * of.heads, of.tokens * of.kv_heads
    each = head_dim + value_dim
    small = sum(gathered) * each <= _KEPT_SHARE * sum(own) * each
    most = assignment.most_received(sizes)
    return _Decided(assignment, complete and small, most, widened, turns)


def _vectors(pieces: Sequence[Any]) -> int:
    return sum(piece.vectors for piece in pieces)


def _fill(report: ShardedReport, decided: _Decided, rank: int) -> None:
    assignment = decided.assignment
    report.way, report.rank, report.ranks = assignment.way, rank, assignment.of.ranks
    report.pairs, report.imbalance = assignment.pairs(rank), assignment.imbalance
    report.most_forward_bytes = decided.most_bytes
    report.stages = len(decided.turns) or assignment.n_stages
    report.kept = decided.kept
    report.forward_bytes = report.backward_bytes = 0
    report.calls.clear()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        call: Sharded,
        watch: Watch,
    ) -> torch.Tensor:
        out, lse, kept = forward(call, watch, query, key, value)
        if any(ctx.needs_input_grad):
            rest = kept if call.kept else [query, key, value, out, lse]
            # A checkpoint recomputes where something saved is asked for, and all ranks have to.
            rest = rest or [out.new_empty(0)]
            ctx.save_for_backward(*rest, *call.calls.read())
            ctx.count = len(rest)
        ctx.call = call
        ctx.like = [(t.shape, t.dtype, t.device) for t in (query, key, value)]
        return out

    @staticmethod
    @first_derivative("quorum_attention.distributed.attention")
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        call: Sharded = ctx.call
        rest = call.calls.saved(ctx, call.group, grad_out.device)[: ctx.count]
        if call.kept:
            # Only their sizes are used: one element each.
            inputs = [torch.empty((), dtype=d, device=w).expand(s) for s, d, w in ctx.like]
        else:
            inputs, rest = list(rest[:3]), rest[3:]
        query, key, value = inputs
        mask = call.calls.mask
        learned = Learned.of(mask, *ctx.needs_input_grad[3:5])
        with call.calls.at_backward(call.group, grad_out.device) as watch:
            made = backward(call, watch, grad_out.contiguous(), query, key, value, rest, learned)
        of_mask = (None, None) if learned is None or mask is None else learned.found(mask)
        return (*made, *of_mask, None, None)


__all__ = ["attention"]
