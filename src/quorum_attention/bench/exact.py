"""Attention and its gradients in float64, in blocks of query rows: the reference for all errors."""

from __future__ import annotations

import torch

_BLOCK_ELEMENTS = 1 << 24


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad_out: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float,
) -> dict[str, torch.Tensor]:
    """{"out": ...} and, with ``grad_out``, "grad_query", "grad_key", "grad_value"; float64.

    query (1, heads, n, d), key and value (1, kv_heads, n, d), any floating dtype.
    """
    heads, n = query.shape[1:3]
    shared = heads // key.shape[1]
    found = {"out": torch.empty(query.shape, dtype=torch.float64, device=query.device)}
    if grad_out is not None:
        for name, like in (("grad_query", query), ("grad_key", key), ("grad_value", value)):
            found[name] = torch.zeros(like.shape, dtype=torch.float64, device=query.device)
    step = max(1, _BLOCK_ELEMENTS // max(1, key.shape[2]))
    for head in range(heads):
        k, v = key[0, head // shared].double(), value[0, head // shared].double()
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            q = query[0, head, rows].double()
            scores = (q @ k.mT).mul_(scale)
            if is_causal:
                position = torch.arange(rows.start, rows.stop, device=query.device)
                after = torch.arange(k.shape[0], device=query.device) > position[:, None]
                scores.masked_fill_(after, float("-inf"))
            p = torch.softmax(scores, dim=-1)
            out = p @ v
            found["out"][0, head, rows] = out
            if grad_out is None:
                continue
            grad = grad_out[0, head, rows].double()
            found["grad_value"][0, head // shared] += p.mT @ grad
            ds = p.mul_((grad @ v.mT).sub_((grad * out).sum(-1, keepdim=True))).mul_(scale)
            found["grad_query"][0, head, rows] = ds @ k
            found["grad_key"][0, head // shared] += ds.mT @ q
    return found


def relative(got: torch.Tensor, right: torch.Tensor) -> float:
    """Norm of the difference, divided by the norm of ``right``."""
    return float((got.to(right.device).double() - right).norm() / right.norm())
