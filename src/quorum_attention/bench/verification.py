"""Compares the output and gradients of sampled rows with float64.

A row of the output or of dQ needs only its own query: O(N D). A row of dK or dV needs
the output and the log-sum-exp of every query row: they are the result's own, whose
sampled rows are checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_QUERIES_AT_A_TIME = 1024
_SAMPLED_QUERIES = 32
_SAMPLED_KEYS = 8


def sampled_errors(
    inputs: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None = None,
    grads: Sequence[Tensor] = (),
    *,
    is_causal: bool,
) -> dict[str, float]:
    """Relative errors (root of summed squares over the sampled rows of all heads) by
    result.

    Args:
        inputs: query (*batch, heads, n, d), key and value of a call without a mask.
        grad_out, grads: the upstream gradient, and the gradients of query, key and
            value.
    """
    query, key, value, out = (tensor.flatten(0, -3) for tensor in (*inputs, out))
    lse = lse.flatten(0, -2)
    group = len(query) // len(key)
    rows = _evenly_spread(query.shape[1], _SAMPLED_QUERIES)
    columns = torch.arange(key.shape[1], device="cpu")
    sampled_queries = query[:, rows].double().requires_grad_()
    if grad_out is not None:
        grad_out = grad_out.flatten(0, -3)
    exact_lses = []
    exact_outs = []
    for head in range(len(query)):
        queries = sampled_queries[head]
        keys = key[head // group].double()
        values = value[head // group].double()
        scores = _scores(queries, rows, keys, columns, is_causal)
        exact_out = scores.softmax(1) @ values
        exact_lses.append(scores.detach().logsumexp(1))
        exact_outs.append(exact_out.detach())
        if grad_out is not None:
            exact_out.backward(grad_out[head, rows].double())
    errors = {
        "lse": relative_error(lse[:, rows], torch.stack(exact_lses)),
        "out": relative_error(out[:, rows], torch.stack(exact_outs)),
    }
    if grad_out is None:
        return errors
    grad_query, grad_key, grad_value = (grad.flatten(0, -3) for grad in grads)
    columns = _evenly_spread(key.shape[1], _SAMPLED_KEYS)
    exact_key, exact_value = _exact_key_gradients(
        query,
        key[:, columns],
        value[:, columns],
        columns,
        out,
        lse,
        grad_out,
        is_causal,
    )
    errors["grad_query"] = relative_error(grad_query[:, rows], sampled_queries.grad)
    errors["grad_key"] = relative_error(grad_key[:, columns], exact_key)
    errors["grad_value"] = relative_error(grad_value[:, columns], exact_value)
    return errors


def relative_error(result: Tensor, exact: Tensor | None) -> float:
    """The norm of a result's error over the norm of the exact result, in float64; of an
    exact 0 the norm of the error."""
    assert exact is not None
    result = result.to(exact.device).double()
    error = float((result - exact).norm())
    return error / (float(exact.norm()) or 1.0)


def _exact_key_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    is_causal: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of keys and values at positions ``columns``, (kv_heads, columns,
    d). Those of the query heads that share a key head add up."""
    key = key.double().requires_grad_()
    value = value.double().requires_grad_()
    group = len(query) // len(key)
    all_rows = torch.arange(query.shape[1], device="cpu")
    for head in range(len(query)):
        keys = key[head // group]
        values = value[head // group]
        for rows in all_rows.split(_QUERIES_AT_A_TIME):
            queries = query[head, rows].double()
            scores = _scores(queries, rows, keys, columns, is_causal)
            weights = torch.exp(scores - lse[head, rows, None])
            upstream = grad_out[head, rows].double()
            grad_weights = upstream @ values.mT
            delta = (upstream * out[head, rows].double()).sum(1, keepdim=True)
            # With output and log-sum-exp held as they are, this has the gradients of
            # the call.
            total = (weights * (grad_weights - delta)).sum()
            total.backward()
    return key.grad, value.grad


def _scores(
    query: Tensor, rows: Tensor, key: Tensor, columns: Tensor, is_causal: bool
) -> Tensor:
    """Scores of queries at positions ``rows`` and keys at positions ``columns``."""
    scores: Tensor = query @ key.mT * query.shape[-1] ** -0.5
    if not is_causal:
        return scores
    is_later = columns > rows.unsqueeze(1)
    return scores.masked_fill(is_later, -torch.inf)


def _evenly_spread(n_tokens: int, n_samples: int) -> Tensor:
    """Positions at even distances, the first and the last among them."""
    places = torch.linspace(
        0,
        n_tokens - 1,
        n_samples,
        dtype=torch.float64,
        device="cpu",
    )
    positions: Tensor = places.long().unique()
    return positions
