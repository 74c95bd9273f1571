"""Compares the output and gradients of sampled rows with float64.

A row of the output or of dQ needs only its own query: O(N D). A row of dK or dV needs the output
and the log-sum-exp of every query row: they are the result's own, whose sampled rows are checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

_QUERIES_AT_A_TIME = 1024


def sampled_errors(
    inputs: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None = None,
    grads: Sequence[Tensor] = (),
    *,
    is_causal: bool,
) -> dict[str, float]:
    """Relative errors (root of summed squares over the sampled rows of all heads) by result.

    Args:
        inputs: query (*batch, heads, n, d), key and value of a call without a mask.
        grad_out, grads: the upstream gradient, and the gradients of query, key and value.
    """
    query, key, value, out = (t.flatten(0, -3) for t in (*inputs, out))
    lse, shared = lse.flatten(0, -2), len(query) // len(key)
    all_rows, all_keys = (torch.arange(t.shape[1], device="cpu") for t in (query, key))
    # Evenly spread, both ends among them.
    rows, keys = (
        torch.linspace(0, end, steps, dtype=torch.float64, device="cpu").long().unique()
        for end, steps in ((query.shape[1] - 1, 32), (key.shape[1] - 1, 8))
    )
    # Of each result: summed squares of its errors and of itself.
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(name: str, result: Tensor, right: Tensor | None) -> None:
        assert right is not None
        sums[name][0] += float((result.double() - right).square().sum())
        sums[name][1] += float(right.square().sum())

    def scores_of(q: Tensor, at: Tensor, k: Tensor, keys: Tensor) -> Tensor:
        scores: Tensor = q @ k.mT * q.shape[-1] ** -0.5
        return scores.masked_fill(keys > at[:, None], -torch.inf) if is_causal else scores

    for head, queries in enumerate(query):
        k, v = key[head // shared].double(), value[head // shared].double()
        q = queries[rows].double().requires_grad_(grad_out is not None)
        scores = scores_of(q, rows, k, all_keys)
        row_out = scores.softmax(1) @ v
        add("lse", lse[head][rows], scores.detach().logsumexp(1))
        add("out", out[head][rows], row_out.detach())
        if grad_out is None:
            continue
        upstream, grad_query, grad_key, grad_value = (t.flatten(0, -3) for t in (grad_out, *grads))
        row_out.backward(upstream[head][rows].double())
        add("grad_query", grad_query[head][rows], q.grad)
        if head % shared == 0:  # query heads that share a key head add up
            few_k, few_v = k[keys].requires_grad_(), v[keys].requires_grad_()
        for block in all_rows.split(_QUERIES_AT_A_TIME):
            q, grad, o = (t[head][block].double() for t in (query, upstream, out))
            p = torch.exp(scores_of(q, block, few_k, keys) - lse[head][block][:, None])
            # With output and log-sum-exp held as they are, this has the gradients of the call.
            (p * (grad @ few_v.mT - (grad * o).sum(1, keepdim=True))).sum().backward()
        if head % shared == shared - 1:
            add("grad_key", grad_key[head // shared][keys], few_k.grad)
            add("grad_value", grad_value[head // shared][keys], few_v.grad)
    return {name: (wrong / (right or 1.0)) ** 0.5 for name, (wrong, right) in sums.items()}
