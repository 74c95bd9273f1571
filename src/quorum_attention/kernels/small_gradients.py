"""Gradients of a small call from materialised scores, in fp32; in float64 for such inputs.

For 16-bit calls delta is computed from the probabilities (kernels/delta.py). Once these are there,
the gradients are three more products. On a CPU that takes less time than a carrier and torch's
operator, and nothing is rounded to 16 bits in between. In float64 the probabilities of a row add up
to 1, as torch's materialised ones do, where exp(score - lse) loses digits if scores are large.
"""

from __future__ import annotations

import torch

from quorum_attention.kernels.delta import not_whole
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
