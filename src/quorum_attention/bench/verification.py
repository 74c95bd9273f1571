"""Compares the output and gradients of sampled rows with float64.

A row of the output or of dQ needs only its own query: O(N D). A row of dK or dV needs
the output
and the log-sum-exp of every query row: they are the result's own, whose sampled rows
are checked.
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
    """Relative errors (root of summed squares over the sampled rows of all heads) by
    result.

    Args:
        inputs: query (*batch, heads, n, d), key and value of a call without a mask.
        grad_out, grads: the upstream gradient, and the gradients of query, key and
            value.
    """
    query, key, value = (tensor.flatten(0, -3) for tensor in inputs)
    out = out.flatten(0, -3)
    lse = lse.flatten(0, -2)
    group = len(query) // len(key)
    grad_query = grad_key = grad_value = None
    if grad_out is not None:
        grad_out = grad_out.flatten(0, -3)
        grad_query, grad_key, grad_value = (grad.flatten(0, -3) for grad in grads)
    sums = _ErrorSums()
    for key_head in range(len(key)):
        heads = []
        for h in range(key_head * group, (key_head + 1) * group):
            head = _Head(
                query[h],
                key[key_head],
                value[key_head],
                out[h],
                lse[h],
                is_causal,
                None if grad_out is None else grad_out[h],
            )
            _add_row_errors(sums, head, None if grad_query is None else grad_query[h])
            heads.append(head)
        if grad_key is not None and grad_value is not None:
            _add_key_errors(sums, heads, grad_key[key_head], grad_value[key_head])
    return sums.relative()


class _Head(NamedTuple):
    """A query head of a forward, with the key head that it reads."""

    query: Tensor  # (n, d)
    key: Tensor  # (m, d)
    value: Tensor  # (m, d_v)
    out: Tensor  # (n, d_v)
    lse: Tensor  # (n,)
    is_causal: bool
    grad_out: Tensor | None  # (n, d_v)

    def sampled_queries(self) -> Tensor:
        """Positions of sampled queries."""
        return _evenly_spread(len(self.query), _SAMPLED_QUERIES)

    def sampled_keys(self) -> Tensor:
        """Positions of sampled keys."""
        return _evenly_spread(len(self.key), _SAMPLED_KEYS)

    def scores(
        self, query: Tensor, rows: Tensor, key: Tensor, columns: Tensor
    ) -> Tensor:
        """Scores of queries at positions ``rows`` and keys at positions ``columns``."""
        scale = query.shape[-1] ** -0.5
        scores: Tensor = query @ key.mT * scale
        if not self.is_causal:
            return scores
        is_later = columns > rows.unsqueeze(1)
        return scores.masked_fill(is_later, -torch.inf)

    def exact_rows(self, query: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The scores and the output of queries at positions ``rows``, (rows, m) and
        (rows, d_v)."""
        key = self.key.double()
        value = self.value.double()
        columns = torch.arange(len(key), device="cpu")
        scores = self.scores(query, rows, key, columns)
        probabilities = scores.softmax(1)
        return scores, probabilities @ value


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


class _ErrorSums:
    """Summed squares by result: of its errors, and of its right values."""

    def __init__(self) -> None:
        self._errors: dict[str, float] = defaultdict(float)
        self._values: dict[str, float] = defaultdict(float)

    def add(self, name: str, result: Tensor, exact: Tensor | None) -> None:
        """Add some rows of a result."""
        assert exact is not None
        error = result.double() - exact
        self._errors[name] += float(error.square().sum())
        self._values[name] += float(exact.square().sum())

    def relative(self) -> dict[str, float]:
        """The relative error of each result."""
        relative_errors = {}
        for name, squared_error in self._errors.items():
            squared_size = self._values[name] or 1.0
            relative_errors[name] = (squared_error / squared_size) ** 0.5
        return relative_errors


def _add_row_errors(sums: _ErrorSums, head: _Head, grad_query: Tensor | None) -> None:
    """Add the errors of a head's sampled rows: of the forward, and of ``grad_query``
    (n, d)."""
    rows = head.sampled_queries()
    query = head.query[rows].double().requires_grad_()
    scores, exact_out = head.exact_rows(query, rows)
    exact_lse = scores.detach().logsumexp(1)
    sums.add("lse", head.lse[rows], exact_lse)
    sums.add("out", head.out[rows], exact_out.detach())
    if head.grad_out is None or grad_query is None:
        return
    upstream = head.grad_out[rows].double()
    exact_out.backward(upstream)
    sums.add("grad_query", grad_query[rows], query.grad)


def _add_key_errors(
    sums: _ErrorSums, heads: Sequence[_Head], grad_key: Tensor, grad_value: Tensor
) -> None:
    """Add the errors of sampled keys and values of a key head.

    Args:
        heads: the query heads that share the key head. Their gradients add up.
        grad_key, grad_value: (m, d) and (m, d_v).
    """
    first = heads[0]
    columns = first.sampled_keys()
    key = first.key[columns].double().requires_grad_()
    value = first.value[columns].double().requires_grad_()
    all_rows = torch.arange(len(first.query), device="cpu")
    for head in heads:
        assert head.grad_out is not None
        for rows in all_rows.split(_QUERIES_AT_A_TIME):
            query = head.query[rows].double()
            scores = head.scores(query, rows, key, columns)
            lse = head.lse[rows, None]
            weights = torch.exp(scores - lse)
            upstream = head.grad_out[rows].double()
            grad_weights = upstream @ value.mT
            out = head.out[rows].double()
            delta = (upstream * out).sum(1, keepdim=True)
            # With output and log-sum-exp held as they are, this has the gradients of
            # the call.
            total = (weights * (grad_weights - delta)).sum()
            total.backward()
    sums.add("grad_key", grad_key[columns], key.grad)
    sums.add("grad_value", grad_value[columns], value.grad)
