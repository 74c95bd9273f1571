"""delta of short rows by their own probabilities, not by a rounded output.

A backward takes dS = P (dP - delta) with delta = rowsum(dO * O), and O has been rounded to the
inputs' dtype: where a row has nearly all its weight on one key, P is 1 and dP - delta is next to
nothing but that rounding. delta = rowsum(P * dP) / rowsum(P) has none of it, and makes dS 0 where P
is 1. It takes a row's every key, and as much work again as half a backward: for calls so small that
torch itself may hold all their scores, and of no use to longer ones, where torch's kernels have the
same rounding.

Operators take ``out`` and use it for delta alone, so what they get in its place is anything with
the right product with ``grad_out``.
"""

from __future__ import annotations

import torch

_MOST_PAIRS = 1 << 14
_MOST_BYTES = 2 << 20
# Columns that hold delta between them: each has the digits that the one before could not.
_COLUMNS = 3
# Probabilities of a whole row add up to 1 but for rounding.
_WHOLE = 0.01


def carrier_bytes(
    dtype: torch.dtype, heads_and_batch: int, n_queries: int, n_keys: int, width: int
) -> int:
    """What ``exact_carrier`` takes at most; 0 where a call is not of 16 bits, or not so small that
    it is worth it.

    Args:
        heads_and_batch: query heads, of all batch entries.
        width: head dimension and value dimension together.
    """
    rows, keys = heads_and_batch * n_queries, heads_and_batch * n_keys
    pairs = rows * n_keys
    # In fp32: keys and values of every query head, rows and their gradients thrice, and products.
    n_bytes = 4 * ((keys + 3 * rows) * width + 4 * pairs)
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
) -> torch.Tensor:
    """What to hand to a backward in the place of ``out``, in its dtype.

    Args:
        grad_out, out: (*batch, h, nq, dv).
        query, key, value: (*batch, h, nq, d), (*batch, hk, nk, d), (*batch, hk, nk, dv).
        lse: (*batch, h, nq), of the whole rows.
        mask: boolean or additive, broadcastable to (*batch, h, nq, nk), or None.
    """
    work = torch.promote_types(lse.dtype, torch.float32)
    shared = query.shape[-3] // key.shape[-3]
    k, v = key.to(work), value.to(work)
    if shared > 1:
        k, v = (t.repeat_interleave(shared, dim=-3) for t in (k, v))
    # As the kernel gets it: dP is of this one.
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
    delta = (p * (gradient @ v.mT)).sum(dim=-1) / total
    # An lse of more keys than these: delta is not to be had from them.
    delta.masked_fill_((total - 1.0).abs() > _WHOLE, torch.nan)
    return _carrying(delta, gradient, out)


def _carrying(delta: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Rows whose product with those of ``gradient`` is ``delta``; those of ``out`` itself where
    there is none, or none that is finite."""
    count = min(_COLUMNS, gradient.shape[-1])
    columns = gradient.abs().topk(count, dim=-1).indices
    factors = gradient.gather(-1, columns)
    parts: list[torch.Tensor] = []
    left = delta
    for factor in factors.unbind(-1):
        part = (left / factor).to(out.dtype).nan_to_num_(0.0, posinf=0.0, neginf=0.0)
        parts.append(part)
        left = left - part.to(delta.dtype) * factor
    carried = torch.zeros_like(out, memory_format=torch.contiguous_format)
    carried.scatter_(-1, columns, torch.stack(parts, dim=-1))
    # What is not carried: NaN, a gradient of zeros, more than 16 bits hold.
    missed = (gradient * out.to(delta.dtype)).sum(dim=-1) - delta
    return torch.where((left.abs() < missed.abs()).unsqueeze(-1), carried, out)
