"""Compares the output and gradients of sampled rows with float64.

A row of the output or of dQ needs only its own query: O(N D). A row of dK or dV needs the output
and the log-sum-exp of every query row: they are the result's own, whose sampled rows are checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

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
    """Relative errors (root of summed squares over the sampled rows of all heads) by result.

    Args:
        inputs: query (*batch, heads, n, d), key and value of a call without a mask.
        grad_out, grads: the upstream gradient, and the gradients of query, key and value.
    """
    query, key, value = (tensor.flatten(0, -3) for tensor in inputs)
    forward = _Forward(query, key, value, out.flatten(0, -3), lse.flatten(0, -2), is_causal)
    sums = _ErrorSums()
    for head in range(len(query)):
        _add_forward_errors(sums, forward, head)
    if grad_out is not None:
        grad_out = grad_out.flatten(0, -3)
        grad_query, grad_key, grad_value = (grad.flatten(0, -3) for grad in grads)
        for head in range(len(query)):
            _add_query_error(sums, forward, head, grad_out, grad_query)
        for key_head in range(len(key)):
            _add_key_errors(sums, forward, key_head, grad_out, grad_key, grad_value)
    return sums.relative()


class _Forward(NamedTuple):
    """A forward whose rows are sampled; batch entries and heads are one dimension."""

    query: Tensor  # (b h, n, d)
    key: Tensor  # (b h_kv, m, d)
    value: Tensor  # (b h_kv, m, d_v)
    out: Tensor  # (b h, n, d_v)
    lse: Tensor  # (b h, n)
    is_causal: bool

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return len(self.query) // len(self.key)

    def sampled_queries(self) -> Tensor:
        """Positions of sampled queries."""
        return _evenly_spread(self.query.shape[1], _SAMPLED_QUERIES)

    def sampled_keys(self) -> Tensor:
        """Positions of sampled keys."""
        return _evenly_spread(self.key.shape[1], _SAMPLED_KEYS)

    def scores(self, queries: Tensor, rows: Tensor, keys: Tensor, columns: Tensor) -> Tensor:
        """Scores of queries at positions ``rows`` and keys at positions ``columns``."""
        scores: Tensor = queries @ keys.mT * queries.shape[-1] ** -0.5
        if not self.is_causal:
            return scores
        return scores.masked_fill(columns > rows[:, None], -torch.inf)


def _evenly_spread(n_tokens: int, n_samples: int) -> Tensor:
    """Positions at even distances, the first and the last among them."""
    places = torch.linspace(0, n_tokens - 1, n_samples, dtype=torch.float64, device="cpu")
    positions: Tensor = places.long().unique()
    return positions


class _ErrorSums:
    """Summed squares by result: of its errors, and of its right values."""

    def __init__(self) -> None:
        self._errors: dict[str, float] = defaultdict(float)
        self._values: dict[str, float] = defaultdict(float)

    def add(self, name: str, result: Tensor, exact: Tensor | None) -> None:
        """Add some rows of a result."""
        assert exact is not None
        self._errors[name] += float((result.double() - exact).square().sum())
        self._values[name] += float(exact.square().sum())

    def relative(self) -> dict[str, float]:
        """The relative error of each result."""
        return {
            name: (errors / (self._values[name] or 1.0)) ** 0.5
            for name, errors in self._errors.items()
        }


def _sampled_rows(forward: _Forward, head: int, query_rows: Tensor) -> tuple[Tensor, Tensor]:
    """The scores and the output of sampled queries of a head, (rows, m) and (rows, d_v)."""
    key = forward.key[head // forward.group].double()
    value = forward.value[head // forward.group].double()
    columns = torch.arange(key.shape[0], device="cpu")
    scores = forward.scores(query_rows, forward.sampled_queries(), key, columns)
    return scores, scores.softmax(1) @ value


def _add_forward_errors(sums: _ErrorSums, forward: _Forward, head: int) -> None:
    rows = forward.sampled_queries()
    scores, exact_out = _sampled_rows(forward, head, forward.query[head][rows].double())
    exact_lse = scores.logsumexp(1)
    sums.add("lse", forward.lse[head][rows], exact_lse)
    sums.add("out", forward.out[head][rows], exact_out)


def _add_query_error(
    sums: _ErrorSums, forward: _Forward, head: int, grad_out: Tensor, grad_query: Tensor
) -> None:
    rows = forward.sampled_queries()
    query_rows = forward.query[head][rows].double().requires_grad_()
    _, exact_out = _sampled_rows(forward, head, query_rows)
    exact_out.backward(grad_out[head][rows].double())
    sums.add("grad_query", grad_query[head][rows], query_rows.grad)


def _add_key_errors(
    sums: _ErrorSums,
    forward: _Forward,
    key_head: int,
    grad_out: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
) -> None:
    """Add the errors of sampled keys and values: query heads that share a key head add up."""
    columns = forward.sampled_keys()
    keys = forward.key[key_head][columns].double().requires_grad_()
    values = forward.value[key_head][columns].double().requires_grad_()
    first_head = key_head * forward.group
    all_rows = torch.arange(forward.query.shape[1], device="cpu")
    for head in range(first_head, first_head + forward.group):
        for rows in all_rows.split(_QUERIES_AT_A_TIME):
            query = forward.query[head][rows].double()
            out = forward.out[head][rows].double()
            lse = forward.lse[head][rows]
            upstream = grad_out[head][rows].double()
            weights = torch.exp(forward.scores(query, rows, keys, columns) - lse[:, None])
            delta = (upstream * out).sum(1, keepdim=True)
            # With output and log-sum-exp held as they are, this has the gradients of the call.
            (weights * (upstream @ values.mT - delta)).sum().backward()
    sums.add("grad_key", grad_key[key_head][columns], keys.grad)
    sums.add("grad_value", grad_value[key_head][columns], values.grad)
