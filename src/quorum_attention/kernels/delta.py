"""A more exact delta for small 16-bit calls.

A backward computes dS = P (dP - delta) with delta = rowsum(dO * O), where O has been rounded to the
inputs' dtype. If a row has nearly all its weight on one key, P is 1, and dP - delta consists of
little but that rounding error. delta = rowsum(P * dP) / rowsum(P) does not have this error: where P
is 1, dS becomes 0. It needs all keys of a row and costs half as much as a backward. So it is
computed only for calls so small that torch itself may materialise their scores; in longer ones
torch's own kernels have the same rounding error.

Operators take ``out`` and use it for delta alone. So they are given another tensor in its place,
whose row products with ``grad_out`` are the exact delta: its carrier.
"""

from __future__ import annotations

import torch

from quorum_attention.decomposition.intervals import Rows
from quorum_attention.kernels.dropout import Dropout, dropped, dropped_bytes

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
