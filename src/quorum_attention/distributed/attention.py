"""``distributed.attention``: each rank gives its rows of the sequence, and gets their results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from quorum_attention.counts import one_of, real_number, shown, switch, whole_number
from quorum_attention.distributed.assignment import (
    Assignment,
    Sequences,
    forward_bytes,
)
from quorum_attention.distributed.report import ShardedReport
from quorum_attention.distributed.run import Sharded, backward, forward
from quorum_attention.distributed.swap import Swap
from quorum_attention.distributed.ways import choose
from quorum_attention.distributed.whole_heads import ByHeads, Exchanged, turns_of
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.uncompiled import uncompiled

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Inputs are kept for the backward where they take at most this much of what the shards take.
_KEPT_SHARE = 1.25
# 16-bit calls of so few pairs are computed in fp32: on one device they get an exact delta
# (kernels/delta.py), which needs whole rows.
_WIDENED_PAIRS = 1 << 16


@uncompiled
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
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
    fp64 inputs).

    Args:
        query: (..., heads, rows, head_dim): this rank's rows; fp16, bf16, fp32 or fp64, on the
            device of the group's backend (NCCL: CUDA; Gloo: CPU).
        key: (..., kv_heads, rows, head_dim), value: (..., kv_heads, rows, value_dim): the same
            rows. Batch dimensions, heads and dtype are the same on all ranks.
        group: the process group; None is the default one.
        is_causal: token i of the whole sequence sees tokens j <= i.
        scale: of the scores; None is head_dim ** -0.5.
        enable_gqa: allow fewer key/value heads than query heads.
        lengths: rows of every rank, if they are known, or "equal" if all have as many as this one:
            else they are gathered first. The host waits for that, and ranks that do not agree on
            sizes, dtype or options raise.
        budget, depth, kernel: as in ``quorum_attention.attention``, for each rank by itself: every
        part that a rank computes recovers from a lack of memory on its own. What the rows of a part
            take that are gathered from other ranks comes on top of the budget.
        report: a ``ShardedReport`` to fill with what this rank did.

    Returns:
        (..., heads, rows, value_dim): the result for this rank's rows.

    Raises:
        TypeError, ValueError: arguments that do not fit, also among ranks (unless ``lengths`` is
            given); before anything is sent.
        RuntimeError: there is no process group. Errors of ``quorum_attention.attention`` come
            through; the other ranks then wait until the group's timeout.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("there is no process group: torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup) or group.rank() < 0:
        raise ValueError("group must be a process group that this process is a member of")
    check_shard(query, key, value, switch(enable_gqa, "enable_gqa"))
    causal = switch(is_causal, "is_causal")
    factor = None if scale is None else real_number(scale, "scale")
    sizes = _agreed(group, query, key, value, causal, factor, lengths)
    starts = (0, *accumulate(sizes))
    of = Sequences(starts, query.shape[-3], key.shape[-3], causal)
    batch = math.prod(query.shape[:-3])
    inputs = [t.reshape(batch, *t.shape[-3:]) for t in (query, key, value)]
    if query.element_size() == 2 and batch * of.heads * of.tokens**2 <= _WIDENED_PAIRS:
        inputs = [t.float() for t in inputs]
    options = {"budget": budget, "depth": depth, "kernel": kernel}
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    element = inputs[0].element_size()
    decided = _decided(of, head_dim, value_dim, element)
    assignment = decided.assignment
    if report is not None:
        _fill(report, decided, group.rank())
    out: torch.Tensor
    if assignment.whole_heads:
        shared = of.heads // of.kv_heads
        turns = turns_of(of.kv_heads // of.ranks, shared, batch * decided.most_bytes)
        if report is not None:
            report.stages = len(turns)
        given = {**options, "scale": factor, "enable_gqa": shared > 1, "is_causal": causal}
        exchanged = Exchanged(Swap(group, sizes), turns, given, report)
        out = ByHeads.apply(*inputs, exchanged)  # type: ignore[no-untyped-call]
    else:
        call = Sharded(assignment, group, factor, options, decided.kept, report)
        out = _Attention.apply(*inputs, call)  # type: ignore[no-untyped-call]
    return out.to(query.dtype).reshape(*query.shape[:-1], value_dim)


class _Decided(NamedTuple):
    """How a call is shared.

    Attributes:
        kept: whether its inputs stay where they were computed with until the backward.
        most_bytes: received in a forward by the rank that receives most, of one batch entry.
    """

    assignment: Assignment
    kept: bool
    most_bytes: int


@lru_cache(maxsize=256)
def _decided(of: Sequences, head_dim: int, value_dim: int, element: int) -> _Decided:
    state = max(4, element)
    sizes = forward_bytes(head_dim, value_dim, element, state)
    assignment = choose(of, sizes, 2.0 * (head_dim + value_dim))
    if assignment.whole_heads:
        # The log-sum-exp stays where it was computed.
        sizes = forward_bytes(head_dim, value_dim, element, 0)
    complete = all(p.alone for p in assignment.query_pieces)
    # Vectors of all ranks, as they are gathered and as they lie in the shards.
    gathered = _vectors(assignment.query_pieces), _vectors(assignment.key_pieces)
    own = of.tokens * of.heads, of.tokens * of.kv_heads
    each = head_dim + value_dim
    small = sum(gathered) * each <= _KEPT_SHARE * sum(own) * each
    return _Decided(assignment, complete and small, assignment.most_received(sizes))


def _vectors(pieces: Sequence[Any]) -> int:
    return sum(piece.vectors for piece in pieces)


def _fill(report: ShardedReport, decided: _Decided, rank: int) -> None:
    assignment = decided.assignment
    report.way, report.rank, report.ranks = assignment.way, rank, assignment.of.ranks
    report.pairs, report.imbalance = assignment.pairs(rank), assignment.imbalance
    report.most_forward_bytes = decided.most_bytes
    report.stages, report.kept = assignment.n_stages, decided.kept
    report.forward_bytes = report.backward_bytes = 0
    report.calls.clear()


def check_shard(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> None:
    """Refuse a rank's tensors that do not fit each other.

    Raises:
        TypeError, ValueError: they do not; the message names the argument.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {shown(tensor)}")
        if tensor.dim() < 3:
            raise ValueError(
                f"{name} must be (..., heads, rows, head_dim), got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {tensor.dtype}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} must have the query's dtype and device, {query.dtype} on "
                f"{query.device}, got {tensor.dtype} on {tensor.device}"
            )
        if (*tensor.shape[:-3], tensor.shape[-2]) != (*query.shape[:-3], query.shape[-2]):
            raise ValueError(
                f"{name} must have the query's batch dimensions and rows, "
                f"{(*query.shape[:-3], query.shape[-2])}, got shape {tuple(tensor.shape)}"
            )
    if key.shape[-1] != query.shape[-1] or key.shape[-3] != value.shape[-3]:
        raise ValueError(
            "key must have the query's head_dim and the value's heads, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if not heads or not kv_heads or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"there are {heads} query heads and {kv_heads} key/value heads, which "
            "enable_gqa=True allows"
        )


def _agreed(
    group: dist.ProcessGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float | None,
    lengths: Sequence[int] | str | None,
) -> tuple[int, ...]:
    """Rows of every rank; gathered, unless they are given."""
    rows = query.shape[-2]
    if isinstance(lengths, str):
        one_of(lengths, "lengths", ("equal",))
        return (rows,) * group.size()
    if lengths is not None:
        sizes = tuple(whole_number(n, "lengths", 0) for n in lengths)
        if len(sizes) != group.size() or sizes[group.rank()] != rows:
            raise ValueError(
                f"lengths must have an entry for each of {group.size()} ranks, and {rows} for rank "
                f"{group.rank()}, got {shown(list(sizes))}"
            )
        return sizes
    batch = math.prod(query.shape[:-3])
    told = (
        rows, batch, query.shape[-3], key.shape[-3], query.shape[-1], value.shape[-1],
        _DTYPES.index(query.dtype), int(causal), -1 if scale is None else hash(scale),
    )  # fmt: skip
    mine = torch.tensor(told, dtype=torch.int64, device=query.device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    listed = torch.stack(every).tolist()
    words = (
        "batch size", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "is_causal", "scale",
    )  # fmt: skip
    for number, word in enumerate(words, start=1):
        if len({one[number] for one in listed}) > 1:
            raise ValueError(
                f"the ranks do not agree on {word}; rank {group.rank()} has "
                f"query {tuple(query.shape)} {query.dtype}, key {tuple(key.shape)}, "
                f"is_causal={causal}, scale={scale}"
            )
    return tuple(one[0] for one in listed)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Sharded
    ) -> torch.Tensor:
        out, lse, kept = forward(call, query, key, value)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*(kept if call.kept else (query, key, value, out, lse)))
        ctx.call = call
        ctx.like = [(t.shape, t.dtype, t.device) for t in (query, key, value)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        call: Sharded = ctx.call
        saved = ctx.saved_tensors
        if call.kept:
            rest: Sequence[torch.Tensor] = saved
            # Only their sizes are used: one element each.
            inputs = [torch.empty((), dtype=d, device=w).expand(s) for s, d, w in ctx.like]
        else:
            inputs, rest = list(saved[:3]), saved[3:]
        made = backward(call, grad_out.contiguous(), inputs[0], inputs[1], inputs[2], rest)
        return (*made, None)


__all__ = ["attention"]
