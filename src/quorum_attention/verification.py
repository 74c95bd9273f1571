"""Compares the output and gradients of sampled rows with float64.

A row of the output or of dQ needs only its own query: O(N D). A row of dK or dV needs the
log-sum-exp of *every* query row. They are computed in float64 where that is affordable; otherwise
they are the result's own lse, whose sampled rows are checked too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch

_BLOCK_ELEMENTS = 1 << 20
# An error of dQ or dK is relative to no less than this share of the terms that it is a difference
# of: of one key, say, they cancel exactly, and what rounding leaves of them is no error.
_CANCELLED = 0.1

Index = tuple[int, ...]


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

    def heads(self) -> list[tuple[Index, Index]]:
        """(query index, key index) of every head."""
        *batch, heads = self.query.shape[:-2]
        shared = heads // self.key.shape[-3]
        indices = []
        for *entry, head in product(*(range(n) for n in (*batch, heads))):
            indices.append(((*entry, head), (*entry, head // shared)))
        return indices

    def scores(self, at: Index, key_at: Index, rows: torch.Tensor) -> torch.Tensor:
        """Scores (rows, n_keys) of some query rows of a head, float64, causal mask applied."""
        query, key = self.query[at][rows].double(), self.key[key_at].double()
        scores = torch.matmul(query, key.mT).mul_(self.scale)
        if self.is_causal:
            keys = torch.arange(scores.shape[1], device="cpu")
            scores = scores.masked_fill_(keys > rows.unsqueeze(1), float("-inf"))
        return scores


def sample(n: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Up to ``count`` positions below ``n``: both ends and random ones between, ascending."""
    if n <= count:
        return torch.arange(n, device="cpu")
    inner = torch.randint(0, n, (count - 2,), generator=generator, device="cpu")
    chosen: torch.Tensor = torch.unique(torch.cat([torch.tensor([0, n - 1], device="cpu"), inner]))
    return chosen


@dataclass(slots=True)
class Expected:
    """The float64 answer on sampled rows, by head.

    Attributes:
        query_rows, key_rows: the positions of the sampled queries and keys.
        lse_is_exact: see ``Sampled``.
        terms_query, terms_key: summed squares of the terms that dQ and dK are differences of.
    """

    query_rows: torch.Tensor
    key_rows: torch.Tensor
    lse_is_exact: bool
    out: dict[Index, torch.Tensor]
    lse: dict[Index, torch.Tensor]
    grad_query: dict[Index, torch.Tensor]
    grad_key: dict[Index, torch.Tensor]
    grad_value: dict[Index, torch.Tensor]
    terms_query: float = 0.0
    terms_key: float = 0.0


def expect(
    problem: Problem,
    grad_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
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

    Raises:
        ValueError: a problem too large for exact gradients came without ``out`` and ``lse``.
    """
    generator = torch.Generator().manual_seed(seed)
    query_rows = sample(problem.query.shape[-2], rows, generator)
    key_rows = sample(problem.key.shape[-2], keys, generator)
    indices = problem.heads()
    n_pairs = problem.query.shape[-2] * problem.key.shape[-2] * len(indices)
    exact = n_pairs <= exact_lse_pairs
    if grad_out is not None and not exact and (lse is None or out is None):
        raise ValueError("out and lse are needed to check gradients of a problem of this size")
    found = Expected(query_rows, key_rows, exact, {}, {}, {}, {}, {})
    for at, key_at in indices:
        scores = problem.scores(at, key_at, query_rows)
        row_lse = torch.logsumexp(scores, dim=1)
        p = torch.exp(scores - row_lse.unsqueeze(1))
        value = problem.value[key_at].double()
        found.lse[at] = row_lse
        found.out[at] = row_out = p @ value
        if grad_out is None:
            continue
        row_grad = grad_out[at][query_rows].double()
        delta = (row_grad * row_out).sum(dim=1, keepdim=True)
        key, ds = problem.key[key_at].double(), p * (row_grad @ value.mT - delta)
        found.grad_query[at] = ds @ key * problem.scale
        found.terms_query += problem.scale**2 * float((_terms(p, row_grad, value) @ key**2).sum())
        given = None if exact or out is None or lse is None else (out, lse)
        dk, dv, terms = _key_gradients(problem, at, key_at, key_rows, grad_out, given)
        # Query heads that share a key head add up.
        found.grad_key[key_at] = found.grad_key.get(key_at, torch.zeros_like(dk)) + dk
        found.grad_value[key_at] = found.grad_value.get(key_at, torch.zeros_like(dv)) + dv
        found.terms_key += terms
    return found


def compare(
    expected: Expected,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> Sampled:
    """The errors of a result: out (*batch, heads, n, dv), lse (*batch, heads, n), gradients."""
    rows, keys = expected.query_rows, expected.key_rows
    return Sampled(
        out=_relative(expected.out, out, rows),
        lse=None if lse is None else _relative(expected.lse, lse, rows),
        grad_query=None
        if grads is None
        else _relative(expected.grad_query, grads[0], rows, expected.terms_query),
        grad_key=None
        if grads is None
        else _relative(expected.grad_key, grads[1], keys, expected.terms_key),
        grad_value=None if grads is None else _relative(expected.grad_value, grads[2], keys),
        lse_is_exact=expected.lse_is_exact,
    )


def _relative(
    expected: dict[Index, torch.Tensor], got: torch.Tensor, rows: torch.Tensor, terms: float = 0.0
) -> float:
    difference = size = 0.0
    for at, right in expected.items():
        difference += float((got[at][rows].double() - right).square().sum())
        size += float(right.square().sum())
    size = max(size, _CANCELLED**2 * terms)
    return math.sqrt(difference / size) if size else math.sqrt(difference)


def _terms(p: torch.Tensor, grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Summed squares of the terms of each element of ``p * (grad @ value.mT)``."""
    return p.square() * (grad.square() @ value.square().mT)


def _key_gradients(
    problem: Problem,
    at: Index,
    key_at: Index,
    key_rows: torch.Tensor,
    grad_out: torch.Tensor,
    given: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """One query head's share of dK and dV at ``key_rows``, over all query rows, in blocks; and the
    summed squares of dK's terms.

    With ``given`` None everything is float64 from the inputs alone; otherwise each row's output
    and log-sum-exp are taken from it.
    """
    n_queries, n_keys = problem.query.shape[-2], problem.key.shape[-2]
    keys = problem.key[key_at][key_rows].double()
    values = problem.value[key_at][key_rows].double()
    dk, dv, terms = torch.zeros_like(keys), torch.zeros_like(values), 0.0
    step = max(1, _BLOCK_ELEMENTS // (n_keys if given is None else 1024))
    for start in range(0, n_queries, step):
        rows = torch.arange(start, min(start + step, n_queries), device="cpu")
        grad = grad_out[at][rows].double()
        if given is None:
            scores = problem.scores(at, key_at, rows)
            row_lse = torch.logsumexp(scores, dim=1, keepdim=True)
            row_out = torch.exp(scores - row_lse) @ problem.value[key_at].double()
            scores = scores[:, key_rows]
        else:
            row_out = given[0][at][rows].double()
            row_lse = given[1][at][rows].double().unsqueeze(1)
            scores = problem.query[at][rows].double() @ keys.mT * problem.scale
            if problem.is_causal:
                scores.masked_fill_(key_rows > rows.unsqueeze(1), float("-inf"))
        p = torch.exp(scores - row_lse)
        delta = (grad * row_out).sum(dim=1, keepdim=True)
        dv += p.mT @ grad
        query = problem.query[at][rows].double()
        dk += (p * (grad @ values.mT - delta)).mT @ query
        terms += float((_terms(p, grad, values).mT @ query**2).sum())
    return dk * problem.scale, dv, terms * problem.scale**2
