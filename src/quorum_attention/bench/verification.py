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
        backward = _Backward(grad_out.flatten(0, -3), *(grad.flatten(0, -3) for grad in grads))
        for head in range(len(query)):
            _add_query_error(sums, forward, backward, head)
        for key_head in range(len(key)):
            _add_key_errors(sums, forward, backward, key_head)
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


class _Backward(NamedTuple):
    """The gradients of a forward; batch entries and heads are one dimension."""

    grad_out: Tensor  # (b h, n, d_v)
    grad_query: Tensor  # (b h, n, d)
    grad_key: Tensor  # (b h_kv, m, d)
    grad_value: Tensor  # (b h_kv, m, d_v)


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


def _sampled_rows(forward: _Forward, head: int, queries: Tensor) -> tuple[Tensor, Tensor]:
    """The scores and the output of sampled queries of a head, (rows, m) and (rows, d_v)."""
    key_head = head // forward.group
    key = forward.key[key_head].double()
    value = forward.value[key_head].double()
    rows = forward.sampled_queries()
    columns = torch.arange(key.shape[0], device="cpu")
    scores = forward.scores(queries, rows, key, columns)
    weights = scores.softmax(1)
    return scores, weights @ value


def _add_forward_errors(sums: _ErrorSums, forward: _Forward, head: int) -> None:
    rows = forward.sampled_queries()
    queries = forward.query[head][rows].double()
    scores, exact_out = _sampled_rows(forward, head, queries)
    exact_lse = scores.logsumexp(1)
    lse = forward.lse[head][rows]
    out = forward.out[head][rows]
    sums.add("lse", lse, exact_lse)
    sums.add("out", out, exact_out)


def _add_query_error(sums: _ErrorSums, forward: _Forward, backward: _Backward, head: int) -> None:
    rows = forward.sampled_queries()
    queries = forward.query[head][rows].double()
    queries.requires_grad_()
    _, exact_out = _sampled_rows(forward, head, queries)
    grad_out = backward.grad_out[head][rows].double()
    exact_out.backward(grad_out)
    grad_query = backward.grad_query[head][rows]
    sums.add("grad_query", grad_query, queries.grad)


def _add_key_errors(
    sums: _ErrorSums, forward: _Forward, backward: _Backward, key_head: int
) -> None:
    """Add the errors of sampled keys and values. Query heads that share a key head add up."""
    columns = forward.sampled_keys()
    keys = forward.key[key_head][columns].double()
    values = forward.value[key_head][columns].double()
    keys.requires_grad_()
    values.requires_grad_()
    first_head = key_head * forward.group
    all_rows = torch.arange(forward.query.shape[1], device="cpu")
    for head in range(first_head, first_head + forward.group):
        for rows in all_rows.split(_QUERIES_AT_A_TIME):
            query = forward.query[head][rows].double()
            out = forward.out[head][rows].double()
            lse = forward.lse[head][rows]
            grad_out = backward.grad_out[head][rows].double()
            scores = forward.scores(query, rows, keys, columns)
            weights = torch.exp(scores - lse[:, None])
            delta = (grad_out * out).sum(1, keepdim=True)
            grad_weights = grad_out @ values.mT
            # With output and log-sum-exp held as they are, this has the gradients of the call.
            (weights * (grad_weights - delta)).sum().backward()
    grad_key = backward.grad_key[key_head][columns]
    grad_value = backward.grad_value[key_head][columns]
    sums.add("grad_key", grad_key, keys.grad)
    sums.add("grad_value", grad_value, values.grad)
