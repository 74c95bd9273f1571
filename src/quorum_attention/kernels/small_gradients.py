"""Gradients of a small call from materialised scores, in fp32; in float64 for such inputs.

For 16-bit calls delta is computed from the probabilities, as below. Once these are there,
the gradients are three more products. On a CPU that takes less time than a carrier and torch's
operator, and nothing is rounded to 16 bits in between. In float64 the probabilities of a row add up
to 1, as torch's materialised ones do, where exp(score - lse) loses digits if scores are large.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from quorum_attention.decomposition.intervals import Rows
from quorum_attention.kernels.cpu import sums_groups
from quorum_attention.kernels.dropout import Dropout, dropped, dropped_bytes
from quorum_attention.kernels.protocol import Call, Saved, Three


def small_gradients(call: Call, saved: Saved, columns: int = 0, *, own: bool = False) -> Three:
    """The gradients of query, key and value, in the dtype of ``lse``; of keys and values summed
    over the query heads that share them.

    Where a score is not finite, gradients of other rows can be NaN too: 0 times NaN is NaN.

    Args:
        saved: lse is fp32 or fp64, 0 in rows without keys.
        columns: how many of the last columns of ``out`` are none of the output's, but take
            something from delta (the value has 0 there).
        own: ``lse`` is that of these keys and of no others; it is not read then. Rows without a
            key are NaN.
    """
    query, key, value, scale, bias = *call.inputs, call.scale, call.bias
    grad_out, out, lse = saved.grad_out, saved.out, saved.lse
    batch, key_heads, n_keys, _ = key.shape
    pairs = (*query.shape[:3], n_keys)
    # Query heads that share a key head are further rows of it.
    lanes, work = batch * key_heads, lse.dtype
    q, k, v, g = [t.reshape(lanes, -1, t.shape[3]) for t in (query, key, value, grad_out)]
    if q.dtype != work:
        q, k, v, g = [t.to(work) for t in (q, k, v, g)]
    scores = torch.bmm(q, k.mT).mul_(scale)
    if bias is not None:
        scores.view(pairs).add_(bias)
    if call.causal:
        above = torch.ones(pairs[2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.view(pairs).masked_fill_(above, -torch.inf)
    p = scores.softmax(dim=-1)
    dp = torch.bmm(g, v.mT)
    others = None if own else _rows_of_more_keys(scores, lse.reshape(*q.shape[:2], 1))
    if others is None and not columns:
        # p (dp - rowsum(p dp))
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
    else:
        if others is not None:
            p = torch.where(others, (scores - lse.reshape(*q.shape[:2], 1)).exp_(), p)
        ds = dp.mul_(p)
        delta = ds.sum(dim=-1, keepdim=True)
        row = out.reshape(g.shape)
        if columns:
            delta += (g[..., -columns:] * row[..., -columns:]).sum(dim=-1, keepdim=True)
        if others is not None:
            delta = torch.where(others, (g * row).sum(dim=-1, keepdim=True), delta)
        ds.addcmul_(p, delta, value=-1.0)
    ds.mul_(scale)
    return (
        torch.bmm(ds, k).view(query.shape),
        torch.bmm(ds.mT, q).view(key.shape),
        torch.bmm(p.mT, g).view(value.shape),
    )


def small_gradients_bytes(
    batch: int,
    heads: int,
    key_heads: int,
    n_queries: int,
    n_keys: int,
    head_dim: int,
    value_dim: int,
) -> int:
    """Upper bound of the bytes that ``small_gradients`` of 16-bit inputs takes, its results and
    what is held of each row included."""
    rows, keys = batch * heads * n_queries, batch * key_heads * n_keys
    # All that it reads in fp32 and three gradients, or copies in 16 bits before these; score
    # matrices, one of them while rows of more keys are told; numbers of each row.
    return 4 * (2 * (rows + keys) * (head_dim + value_dim) + 5 * rows * n_keys + 5 * rows)


def _rows_of_more_keys(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor | None:
    """Which rows have an lse of more keys than those of ``scores`` (.., nk), no key at all, or one
    of them that is not finite; None: no row. ``lse`` is 0 in rows without keys."""
    total = (scores.logsumexp(dim=-1, keepdim=True) - lse).exp_()
    # An lse of +inf is of a key that has broken the row, and that is none of these.
    others = not_whole(total, lse).logical_or_(total.isnan()).logical_or_(lse == torch.inf)
    return others if bool(others.any()) else None


# A more exact delta for small 16-bit calls.
#
# A backward computes dS = P (dP - delta) with delta = rowsum(dO * O), where O has been rounded to
# the inputs' dtype. If a row has nearly all its weight on one key, P is 1, and dP - delta consists
# of little but that rounding error. delta = rowsum(P * dP) / rowsum(P) does not have this error:
# where P is 1, dS becomes 0. It needs all keys of a row and costs half as much as a backward. So it
# is computed only for calls so small that torch itself may materialise their scores; in longer ones
# torch's own kernels have the same rounding error.
#
# Operators take ``out`` and use it for delta alone. So they are given another tensor in its place,
# whose row products with ``grad_out`` are the exact delta: its carrier.

_MOST_PAIRS = 1 << 14
_MOST_BYTES = 2 << 20
# Columns of the carrier that are not 0: each holds the digits that the ones before it could not.
_COLUMNS = 3
# The probabilities of a row add up to 1 within this and the rounding of scores near lse, if lse is
# the lse of these keys.
_WHOLE = 2.0**-12
_ROUNDING = 2.0**-20
_WIDE = (2.0**-47, 2.0**-44)
# What a sum in fp32 of a row's products may be off by, as a share of their sizes.
_SUM = 2.0**-21


def carrier_bytes(
    dtype: torch.dtype,
    heads_and_batch: int,
    n_queries: int,
    n_keys: int,
    width: int,
    *,
    dropout: bool = False,
) -> int:
    """Upper bound of the bytes ``exact_carrier`` takes; 0 if the call is too large for it, or its
    dtype is not of 16 bits.

    Args:
        heads_and_batch: query heads times batch entries.
        width: head dimension plus value dimension.
        dropout: whether probabilities are dropped.
    """
    rows, keys = heads_and_batch * n_queries, heads_and_batch * n_keys
    pairs = rows * n_keys
    # In fp32: keys and values of every query head, three copies of the rows, four score matrices.
    n_bytes = 4 * ((keys + 3 * rows) * width + 4 * pairs)
    if dropout:
        n_bytes += dropped_bytes(1, heads_and_batch, n_queries, n_keys)
    small = dtype.itemsize == 2 and pairs <= _MOST_PAIRS and n_bytes <= _MOST_BYTES
    return n_bytes if small else 0


def exact_carrier(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout: Dropout | None = None,
    columns: int = 0,
) -> torch.Tensor:
    """The tensor to hand to a backward in the place of ``out``, of its shape and dtype.

    Args:
        grad_out, out: (*batch, h, nq, dv).
        query, key, value: (*batch, h, nq, d), (*batch, hk, nk, d), (*batch, hk, nk, dv).
        lse: (*batch, h, nq), of the whole rows.
        mask: boolean or additive, broadcastable to (*batch, h, nq, nk), or None.
        dropout: of the call, or None; delta is then rowsum(P * Z * dP) / rowsum(P).
        columns: how many of the last columns of ``out`` are none of the output's, but take
            something from delta (the value has 0 there).
    """
    work = torch.promote_types(lse.dtype, torch.float32)
    shared = query.shape[-3] // key.shape[-3]
    k, v = key.to(work), value.to(work)
    if shared > 1:
        k, v = (t.repeat_interleave(shared, dim=-3) for t in (k, v))
    # Rounded to the dtype in which the kernel gets it.
    gradient = grad_out.to(query.dtype).to(work)
    scores = (query.to(work) @ k.mT).mul_(scale)
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask.to(scores.device), -torch.inf)
    elif mask is not None:
        scores += mask.to(scores.device, query.dtype)
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(above, -torch.inf)
    p = scores.sub_(lse.unsqueeze(-1)).exp_()
    total = p.sum(dim=-1)
    if dropout is not None:
        p.mul_(dropout.rescale).masked_fill_(_dropped(dropout, p), 0.0)
    delta = (p * (gradient @ v.mT)).sum(dim=-1) / total
    if columns:
        delta += (gradient[..., -columns:] * out[..., -columns:].to(work)).sum(dim=-1)
    # Such a row's lse is of more keys than these, so delta cannot be computed from them.
    delta.masked_fill_(not_whole(total, lse), torch.nan)
    return _carrying(delta, gradient, out)


def not_whole(total: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Which rows see other keys as well, by the sums of their probabilities, and their lse.

    Not those whose sum is NaN. Told by its logarithm, which rounding moves as much as it moves lse:
    beside an lse of a million, the sum itself may be anything from 0 on.
    """
    # In float64 delta of other rows is as exact: only rounding is allowed for.
    rounding, whole = _WIDE if lse.dtype == torch.float64 else (_ROUNDING, _WHOLE)
    return total.log().abs_() > lse.abs() * rounding + whole


def _dropped(dropout: Dropout, p: torch.Tensor) -> torch.Tensor:
    """Which probabilities of a whole call (*batch, h, nq, nk) are dropped."""
    heads, n_queries, n_keys = p.shape[-3:]
    rows = torch.arange(n_queries, device=p.device)
    batch = p.shape[:-3].numel()
    return dropped(dropout, batch, heads, rows, [Rows(0, n_keys, 0)]).view(p.shape)


def _carrying(delta: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Rows whose products with the rows of ``gradient`` are ``delta``.

    A row of ``out`` is returned as it is if it comes closer, or if its delta cannot be carried:
    delta is NaN, the gradient is 0, or the factor does not fit 16 bits.
    """
    count = min(_COLUMNS, gradient.shape[-1])
    columns = gradient.abs().topk(count, dim=-1).indices
    factors = gradient.gather(-1, columns)
    parts: list[torch.Tensor] = []
    left = delta
    for factor in factors.unbind(-1):
        part = (left / factor).to(out.dtype).nan_to_num_(0.0, posinf=0.0, neginf=0.0)
        parts.append(part)
        left = left.addcmul(part.to(delta.dtype), factor, value=-1.0)
    carried = torch.zeros_like(out, memory_format=torch.contiguous_format)
    carried.scatter_(-1, columns, torch.stack(parts, dim=-1))
    products = gradient * out.to(delta.dtype)
    missed = (products.sum(dim=-1) - delta).abs_()
    # As close as its sum can be told, ``out`` is better: where ``gradient`` is divided and rounded
    # later on, what three columns carry may be off by more than what all of them do.
    close = products.abs_().sum(dim=-1).mul_(_SUM)
    return torch.where((left.abs_().add_(close) < missed).unsqueeze(-1), carried, out)


# Gradients of a short 16-bit call on a CPU by the operator in fp32.
#
# torch's operator multiplies matrices of 16 bits one small tile at a time, by a library whose call
# takes longer than the product; where the processor has no instructions for fp16, five times as
# long and more. In fp32, with all that it reads copied and its results rounded once, the same
# backward takes a seventh of the time in fp16, and half in bf16. It is twice as exact too:
# probabilities and the parts of sums are not rounded to 16 bits (docs/gradients.md).

WIDENED_BYTES = 4 << 20
"""Most bytes in fp32 that are held at any one time."""

Run = Callable[[Call, Saved], Three]
_At = tuple[slice, slice]


def quicker_widened(dtype: torch.dtype, *, grouped: bool) -> bool:
    """Whether gradients of this dtype are computed in fp32: not those of bf16 that torch's autograd
    records, of calls without grouped heads."""
    if dtype == torch.bfloat16:
        return grouped
    return dtype == torch.float16 and not _multiplies_fp16()


def heads_at_a_time(
    batch: int,
    heads: int,
    key_heads: int,
    n_queries: int,
    n_keys: int,
    widths: tuple[int, int],
    *,
    masked: bool = False,
    causal: bool = False,
) -> int:
    """How many key heads, with their query heads, go to the operator together; all of the batch's
    if there are as many. 0 if the call is too large, or that would leave threads idle.

    Args:
        widths: head and value dimension.
        masked: whether scores have a bias.
        causal: whether the operator's own sums over query heads may be taken, where it has them.
    """
    shared = heads // key_heads
    width, pads = max(widths), widths[0] != widths[1]
    every = batch * key_heads
    # Query, output, their gradients, a copy of one in another order, the query times a part of the
    # scale; keys and values, and their gradients.
    rows = (6 + 2 * pads) * shared * n_queries * width
    keys = (4 + 2 * pads) * n_keys * width
    one = 4 * (rows + keys + masked * shared * n_queries * n_keys)
    most = _together(one, every, key_heads)
    # Of the last ones too: those that are left.
    last = most if most >= every else key_heads % most if most and key_heads % most else most
    if shared == 1 or not causal or not sums_groups(4, min(last, every)):
        # Gradients of keys and values for every query head, before they are summed.
        most = _together(one + 4 * 2 * shared * n_keys * width, every, key_heads)
    busy = min(torch.get_num_threads(), batch * heads)
    return most if most * shared >= busy else 0


def _together(one: int, every: int, key_heads: int) -> int:
    """How many key heads of ``one`` bytes each fit: more than an entry has only if all do."""
    most = WIDENED_BYTES // max(1, one)
    return most if most >= every else min(most, key_heads)


def widened_gradients(run: Run, heads: int, call: Call, saved: Saved) -> Three:
    """The gradients of query, key and value, in their dtype.

    Args:
        run: the operator's backward, in fp32.
        heads: ``heads_at_a_time``.
        call, saved: in 16 bits; lse in fp32.
    """
    batch, key_heads = call.key.shape[:2]
    shared = call.query.shape[1] // key_heads
    every = slice(None)
    if heads >= batch * key_heads:
        made = run(*_widened(call, saved, (every, every), (every, every)))
        return (
            made[0].to(call.query.dtype),
            made[1].to(call.key.dtype),
            made[2].to(call.value.dtype),
        )
    query, key, value = map(torch.empty_like, call.inputs)
    for entry in range(batch):
        for first in range(0, key_heads, heads):
            some = slice(entry, entry + 1), slice(first, first + heads)
            rows = slice(entry, entry + 1), slice(shared * first, shared * (first + heads))
            made = run(*_widened(call, saved, rows, some))
            for whole, at, part in zip((query, key, value), (rows, some, some), made, strict=True):
                whole[at].copy_(part)
            del made, part
    return query, key, value


def _widened(call: Call, saved: Saved, rows: _At, keys: _At) -> tuple[Call, Saved]:
    """Some batch entries and heads of a call in fp32."""
    bias = call.bias
    if bias is not None:
        # What broadcasts does so in parts too.
        at = (rows[0] if bias.shape[0] > 1 else slice(None),
              rows[1] if bias.shape[1] > 1 else slice(None))  # fmt: skip
        bias = bias[at].float()
    return (
        call.mapped(lambda tensor: tensor[rows].float(), lambda tensor: tensor[keys].float(),
                    bias=bias),
        saved.mapped(lambda tensor: tensor[rows].float()),
    )  # fmt: skip


@functools.cache
def _multiplies_fp16() -> bool:
    """Whether torch's matrix products of fp16 have instructions of this processor's."""
    try:
        asked: Any = torch.ops.mkldnn._is_mkldnn_fp16_supported
        return bool(asked())
    except (AttributeError, RuntimeError):
        return False
