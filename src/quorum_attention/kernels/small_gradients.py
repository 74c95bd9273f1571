"""Gradients of a small call from materialised scores, in fp32; in float64 for such inputs.

For 16-bit calls delta is computed from the probabilities (kernels/delta.py). Once these are there,
the gradients are three more products. On a CPU that takes less time than a carrier and torch's
operator, and nothing is rounded to 16 bits in between. In float64 the probabilities of a row add up
to 1, as torch's materialised ones do, where exp(score - lse) loses digits if scores are large.
"""

from __future__ import annotations

import torch

from quorum_attention.kernels.delta import not_whole


def small_gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
    columns: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, in the dtype of ``lse``; of keys and values summed
    over the query heads that share them.

    Where a score is not finite, gradients of other rows can be NaN too: 0 times NaN is NaN.

    Args:
        grad_out, out: (b, h, nq, dv).
        query, key, value: (b, h, nq, d), (b, hk, nk, d), (b, hk, nk, dv).
        lse: (b, h, nq), fp32 or fp64, 0 in rows without keys.
        bias: additive, broadcastable to (b, h, nq, nk), or None.
        causal: query i sees keys j <= i.
        columns: how many of the last columns of ``out`` are none of the output's, but take
            something from delta (the value has 0 there).
    """
    batch, key_heads, n_keys, _ = key.shape
    pairs = (*query.shape[:3], n_keys)
    # Query heads that share a key head are further rows of it.
    q, g, rows = (
        t.reshape(batch * key_heads, -1, width).to(lse.dtype)
        for t, width in ((query, query.shape[3]), (grad_out, grad_out.shape[3]), (lse, 1))
    )
    k, v = (t.reshape(batch * key_heads, n_keys, t.shape[3]).to(lse.dtype) for t in (key, value))
    # Scores less the log-sum-exp of their row.
    if lse.dtype == torch.float64:
        # One product more exact: scores and lse are rounded once each.
        p = torch.bmm(q, k.mT).mul_(scale).sub_(rows)
    else:
        p = torch.baddbmm(rows, q, k.mT, beta=-1.0, alpha=scale)
    if bias is not None:
        p.view(pairs).add_(bias)
    p.exp_()
    if causal:
        p.view(pairs).tril_()
    total = p.sum(dim=-1, keepdim=True)
    others = not_whole(total, rows)
    some_others = bool(others.any())
    p.div_(total.masked_fill_(others, 1.0) if some_others else total)
    ds = p * torch.bmm(g, v.mT)
    delta = ds.sum(dim=-1, keepdim=True)
    if columns:
        carrying = out.reshape(g.shape)[..., -columns:]
        delta += (g[..., -columns:] * carrying).sum(dim=-1, keepdim=True)
    if some_others:
        theirs = (g * out.reshape(g.shape)).sum(dim=-1, keepdim=True)
        delta = torch.where(others, theirs, delta)
    ds.addcmul_(p, delta, value=-1.0).mul_(scale)
    return (
        torch.bmm(ds, k).view(query.shape),
        torch.bmm(ds.mT, q).view(key.shape),
        torch.bmm(p.mT, g).view(value.shape),
    )
