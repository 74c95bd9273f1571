"""Compares the output and gradients of sampled rows with float64.

A row of the output or of dQ needs only its own query: O(N D). A row of dK or dV needs the
log-sum-exp of *every* query row. They are computed in float64 where that is affordable; otherwise
they are the result's own lse, whose sampled rows are checked too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

_BLOCK_ELEMENTS = 1 << 20
# An error of dQ or dK is relative to no less than this share of the terms that it is a difference
# of: of one key, say, they cancel exactly, and what rounding leaves of them is no error.
_CANCELLED = 0.1


@dataclass(frozen=True, slots=True)
class Sampled:
    """Relative errors (root of summed squares over the sampled rows), None where not checked.

    Attributes:
        lse_is_exact: every row's log-sum-exp was computed in float64; otherwise a returned one
            was used for dK and dV.
    """

    out: float
    lse: float | None
    grad_query: float | None = None
    grad_key: float | None = None
    grad_value: float | None = None
    lse_is_exact: bool = True

    def worst(self) -> float:
        """The largest of them; infinite where one is not a number."""
        errors = (self.out, self.lse, self.grad_query, self.grad_key, self.grad_value)
        return max(float("inf") if e != e else e for e in errors if e is not None)


@dataclass(frozen=True, slots=True)
class Problem:
    """An attention call in memory or mapped: query (*batch, heads, n, d) and so on, no mask."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_causal: bool
    scale: float

    def scores(self, head: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Scores (rows, keys) of a head of a batch entry, float64, causal mask applied."""
        query = _heads(self.query)[head][rows].double()
        scores = (query @ _heads(self.key)[self.key_head(head)][keys].double().mT).mul_(self.scale)
        return scores.masked_fill_(keys > rows[:, None], -torch.inf) if self.is_causal else scores

    def key_head(self, head: int) -> int:
        """The key/value head of a query head, both counted over all batch entries."""
        return head // (self.query.shape[-3] // self.key.shape[-3])


def _heads(tensor: torch.Tensor, rank: int = 2) -> torch.Tensor:
    """A view (batch x heads, n, d)."""
    return tensor.flatten(0, -1 - rank)


def _sample(n: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Up to ``count`` positions below ``n``: both ends and random ones between, ascending."""
    if n <= count:
        return torch.arange(n, device="cpu")
    inner = torch.randint(0, n, (count - 2,), generator=generator, device="cpu")
    chosen: torch.Tensor = torch.cat([torch.tensor([0, n - 1], device="cpu"), inner]).unique()
    return chosen


@dataclass(slots=True)
class Expected:
    """The float64 answer on sampled rows, a tensor for each head.

    Attributes:
        query_rows, key_rows: the positions of the sampled queries and keys.
        lse_is_exact: see ``Sampled``.
        terms_query, terms_key: summed squares of the terms that dQ and dK are differences of.
    """

    query_rows: torch.Tensor
    key_rows: torch.Tensor
    lse_is_exact: bool
    out: list[torch.Tensor] = field(default_factory=list)
    lse: list[torch.Tensor] = field(default_factory=list)
    grad_query: list[torch.Tensor] = field(default_factory=list)
    grad_key: list[torch.Tensor] = field(default_factory=list)
    grad_value: list[torch.Tensor] = field(default_factory=list)
    terms_query: float = 0.0
    terms_key: float = 0.0


def expect(
    problem: Problem,
    grad_out: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    rows: int = 32,
    keys: int = 8,
    exact_lse_pairs: int = 1 << 29,
    seed: int = 0,
) -> Expected:
    """The float64 answer on sampled rows of every head.

    Args:
        problem: the inputs.
        grad_out: the upstream gradient; None leaves the gradients out.
        out, lse: a result; its rows are used for dK and dV in place of float64 ones on problems of
            more than ``exact_lse_pairs`` query-key pairs.
        rows, keys: how many query rows and key rows are sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    n_queries, n_keys = problem.query.shape[-2], problem.key.shape[-2]
    query_rows, key_rows = _sample(n_queries, rows, generator), _sample(n_keys, keys, generator)
    query, key, value = (_heads(t) for t in (problem.query, problem.key, problem.value))
    exact = n_queries * n_keys * len(query) <= exact_lse_pairs
    found = Expected(query_rows, key_rows, exact)
    if grad_out is not None:
        found.grad_key = [key.new_zeros(t[key_rows].shape, dtype=torch.float64) for t in key]
        found.grad_value = [key.new_zeros(t[key_rows].shape, dtype=torch.float64) for t in value]
    for head in range(len(query)):
        at = problem.key_head(head)
        row_out, row_lse, p = _rows(problem, head, query_rows)
        found.out.append(row_out)
        found.lse.append(row_lse)
        if grad_out is None:
            continue
        grad = _heads(grad_out)[head][query_rows].double()
        ds, terms = _score_gradients(p, grad, row_out, value[at].double())
        keys_64 = key[at].double()
        found.grad_query.append(ds @ keys_64 * problem.scale)
        found.terms_query += problem.scale**2 * float((terms @ keys_64**2).sum())
        # Query heads that share a key head add up.
        for block in _blocks(n_queries, n_keys if exact else 1024):
            grad, block_query = _heads(grad_out)[head][block].double(), query[head][block].double()
            if exact:
                block_out, _, p = _rows(problem, head, block)
                p = p[:, key_rows]
            else:
                block_out = _heads(out)[head][block].double()
                block_lse = _heads(lse, 1)[head][block].double()
                p = torch.exp(problem.scores(head, block, key_rows) - block_lse[:, None])
            ds, terms = _score_gradients(p, grad, block_out, value[at][key_rows].double())
            found.grad_value[at] += p.mT @ grad
            found.grad_key[at] += ds.mT @ block_query * problem.scale
            found.terms_key += problem.scale**2 * float((terms.mT @ block_query**2).sum())
    return found


def _blocks(n_queries: int, n_keys: int) -> Iterator[torch.Tensor]:
    """All query rows, some at a time."""
    yield from torch.arange(n_queries, device="cpu").split(max(1, _BLOCK_ELEMENTS // n_keys))


def _rows(
    problem: Problem, head: int, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, log-sum-exp and probabilities of some query rows of a head."""
    scores = problem.scores(head, rows, torch.arange(problem.key.shape[-2], device="cpu"))
    lse = torch.logsumexp(scores, dim=1)
    p = torch.exp(scores - lse[:, None])
    return p @ _heads(problem.value)[problem.key_head(head)].double(), lse, p


def _score_gradients(
    p: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dS, and the summed squares of the terms of each of its elements without delta."""
    delta = (grad * out).sum(dim=1, keepdim=True)
    return p * (grad @ value.mT - delta), p.square() * (grad.square() @ value.square().mT)


def compare(
    expected: Expected,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> Sampled:
    """The errors of a result: out (*batch, heads, n, dv), lse (*batch, heads, n), gradients."""
    rows, keys = expected.query_rows, expected.key_rows
    of_lse = None if lse is None else _relative(expected.lse, _heads(lse, 1), rows)
    errors: tuple[float | None, float | None, float | None] = (None, None, None)
    if grads is not None:
        query, key, value = map(_heads, grads)
        errors = (
            _relative(expected.grad_query, query, rows, expected.terms_query),
            _relative(expected.grad_key, key, keys, expected.terms_key),
            _relative(expected.grad_value, value, keys),
        )
    of_out = _relative(expected.out, _heads(out), rows)
    return Sampled(of_out, of_lse, *errors, expected.lse_is_exact)


def _relative(
    expected: list[torch.Tensor], got: torch.Tensor, rows: torch.Tensor, terms: float = 0.0
) -> float:
    right = torch.stack(expected)
    difference = (got[:, rows].double() - right).square().sum()
    size = max(float(right.square().sum()), _CANCELLED**2 * terms)
    return float((difference / size if size else difference).sqrt())
