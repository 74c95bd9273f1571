"""Compares the output and gradients of sampled rows with float64.

A row of the output or of dQ needs only its own query: O(N D). A row of dK or dV needs the output
and the log-sum-exp of every query row: they are the result's own, whose sampled rows are checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

_QUERIES_AT_A_TIME = 1024


def sampled_errors(
    inputs: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor | None = None,
    grads: Sequence[torch.Tensor] = (),
    *,
    is_causal: bool,
) -> dict[str, float]:
    """Relative errors (root of summed squares over the sampled rows of all heads) by result.

    Args:
        inputs: query (*batch, heads, n, d), key and value of a call without a mask.
        grad_out, grads: the upstream gradient, and the gradients of query, key and value.
    """
    query, key, value, out = (t.flatten(0, -3) for t in (*inputs, out))
    lse, scale, shared = lse.flatten(0, -2), query.shape[-1] ** -0.5, len(query) // len(key)
    rows, keys = _sample(query.shape[1], 32), _sample(key.shape[1], 8)
    all_keys = torch.arange(key.shape[1], device="cpu")
    # Of each result: summed squares of its errors and of itself.
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(name: str, result: torch.Tensor, right: torch.Tensor) -> None:
        sums[name][0] += float((result.double() - right).square().sum())
        sums[name][1] += float(right.square().sum())

    def scores_of(of: torch.Tensor, at: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = (of[at].double() @ key[head // shared][keys].double().mT).mul_(scale)
        return scores.masked_fill_(keys > at[:, None], -torch.inf) if is_causal else scores

    for head, queries in enumerate(query):
        keys_64, values_64 = key[head // shared].double(), value[head // shared].double()
        scores = scores_of(queries, rows, all_keys)
        row_lse = scores.logsumexp(1, keepdim=True)
        p = scores.sub_(row_lse).exp_()
        row_out = p @ values_64
        add("lse", lse[head][rows], row_lse[:, 0])
        add("out", out[head][rows], row_out)
        if grad_out is None:
            continue
        upstream, grad_query, *grads_of_keys = (t.flatten(0, -3) for t in (grad_out, *grads))
        ds = _score_gradients(p, upstream[head][rows].double(), row_out, values_64)
        add("grad_query", grad_query[head][rows], ds @ keys_64 * scale)
        if head % shared == 0:  # query heads that share a key head add up
            of_key, of_value = (torch.zeros_like(t[keys]) for t in (keys_64, values_64))
        for block in torch.arange(query.shape[1], device="cpu").split(_QUERIES_AT_A_TIME):
            grad, block_64 = upstream[head][block].double(), queries[block].double()
            p = torch.exp(scores_of(queries, block, keys) - lse[head][block][:, None])
            ds = _score_gradients(p, grad, out[head][block].double(), values_64[keys])
            of_value += p.mT @ grad
            of_key += ds.mT @ block_64 * scale
        if head % shared == shared - 1:
            add("grad_key", grads_of_keys[0][head // shared][keys], of_key)
            add("grad_value", grads_of_keys[1][head // shared][keys], of_value)
    return {name: (wrong / (right or 1.0)) ** 0.5 for name, (wrong, right) in sums.items()}


def _sample(n: int, count: int) -> torch.Tensor:
    """Up to ``count`` positions below ``n``: both ends and random ones between, ascending."""
    if n <= count:
        return torch.arange(n, device="cpu")
    generator = torch.Generator().manual_seed(0)
    inner = torch.randint(0, n, (count - 2,), generator=generator, device="cpu")
    chosen: torch.Tensor = torch.cat([torch.tensor([0, n - 1], device="cpu"), inner]).unique()
    return chosen


def _score_gradients(
    p: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """The gradients of the scores."""
    return p * (grad @ value.mT - (grad * out).sum(dim=1, keepdim=True))
