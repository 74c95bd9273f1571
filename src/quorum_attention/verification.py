"""Is a result right? Output and gradients of sampled rows against float64.

A row of the output needs only its own query: O(N D). So does a row of dQ. A row of dK or dV needs
the log-sum-exp of *every* query row; those come from float64 where that is affordable, else from
the result's own lse, which has been checked on the sampled rows by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Sampled:
    """Relative errors (root of summed squares over the sampled rows), None where not checked.

    Attributes:
        lse_is_exact: every row's log-sum-exp was computed in float64; otherwise the returned one
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
        known = [float("inf") if e != e else e for e in errors if e is not None]
        return max(known)


@dataclass(frozen=True, slots=True)
class Problem:
    """An attention call in memory or mapped: query (*batch, heads, n, d) and so on, no mask."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_causal: bool
    scale: float

    def heads(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(query index, key index) of every head."""
        *batch, heads = self.query.shape[:-2]
        shared = heads // self.key.shape[-3]
        indices = []
        for *entry, head in product(*(range(n) for n in (*batch, heads))):
            indices.append(((*entry, head), (*entry, head // shared)))
        return indices

    def scores(self, at: tuple[int, ...], key_at: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
        """Scores (rows, n_keys) of some query rows of one head, float64, causal mask applied."""
        scores = self.query[at][rows].double() @ self.key[key_at].double().mT * self.scale
        if self.is_causal:
            after = torch.arange(scores.shape[1]) > rows.unsqueeze(1)
            scores.masked_fill_(after, float("-inf"))
        return scores


def sample(n: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Up to ``count`` positions below ``n``: both ends and random ones between, ascending."""
    if n <= count:
        return torch.arange(n)
    inner = torch.randint(0, n, (count - 2,), generator=generator)
    return torch.unique(torch.cat([torch.tensor([0, n - 1]), inner]))


def verify(
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    grad_out: torch.Tensor | None = None,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    *,
    rows: int = 32,
    keys: int = 8,
    exact_lse_pairs: int = 1 << 31,
    seed: int = 0,
) -> Sampled:
    """Compare a result with float64 on sampled rows of every head.

    Args:
        problem: the inputs.
        out: (*batch, heads, n_queries, value_dim), to be checked.
        lse: (*batch, heads, n_queries), to be checked; may be needed for dK and dV.
        grad_out: the upstream gradient, and ``grads`` the three gradients to be checked.
        rows, keys: how many query rows and key rows are sampled.
        exact_lse_pairs: up to this many query-key pairs every lse is computed in float64.

    Raises:
        ValueError: gradients are to be checked on a problem too large for that, without an lse.
    """
    generator = torch.Generator().manual_seed(seed)
    query_rows = sample(problem.query.shape[-2], rows, generator)
    key_rows = sample(problem.key.shape[-2], keys, generator)
    indices = problem.heads()
    n_pairs = problem.query.shape[-2] * problem.key.shape[-2] * len(indices)
    exact = n_pairs <= exact_lse_pairs
    if grads is not None and not exact and lse is None:
        raise ValueError("lse is needed to check gradients of a problem of this size")
    sums = {name: _Error() for name in ("out", "lse", "grad_query", "grad_key", "grad_value")}
    grad_key: dict[tuple[int, ...], torch.Tensor] = {}
    grad_value: dict[tuple[int, ...], torch.Tensor] = {}
    for at, key_at in indices:
        scores = problem.scores(at, key_at, query_rows)
        row_lse = torch.logsumexp(scores, dim=1)
        p = torch.exp(scores - row_lse.unsqueeze(1))
        value = problem.value[key_at].double()
        row_out = p @ value
        sums["out"].add(out[at][query_rows], row_out)
        if lse is not None:
            sums["lse"].add(lse[at][query_rows], row_lse)
        if grad_out is None or grads is None:
            continue
        row_grad = grad_out[at][query_rows].double()
        delta = (row_grad * row_out).sum(dim=1, keepdim=True)
        ds = p * (row_grad @ value.mT - delta)
        row_grad_query = ds @ problem.key[key_at].double() * problem.scale
        sums["grad_query"].add(grads[0][at][query_rows], row_grad_query)
        dk, dv = _key_gradients(problem, at, key_at, key_rows, out, None if exact else lse, grad_out)
        grad_key[key_at] = grad_key.get(key_at, 0) + dk
        grad_value[key_at] = grad_value.get(key_at, 0) + dv
    if grads is not None:
        for key_at, expected in grad_key.items():
            sums["grad_key"].add(grads[1][key_at][key_rows], expected)
            sums["grad_value"].add(grads[2][key_at][key_rows], grad_value[key_at])
    return Sampled(
        out=sums["out"].relative(),
        lse=sums["lse"].relative() if lse is not None else None,
        grad_query=sums["grad_query"].relative() if grads is not None else None,
        grad_key=sums["grad_key"].relative() if grads is not None else None,
        grad_value=sums["grad_value"].relative() if grads is not None else None,
        lse_is_exact=exact,
    )


def _key_gradients(
    problem: Problem,
    at: tuple[int, ...],
    key_at: tuple[int, ...],
    key_rows: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    grad_out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query head's share of dK and dV at ``key_rows``, over all query rows, in blocks.

    With ``lse`` None everything is float64 from the inputs alone; otherwise the given lse and
    output of each row are used.
    """
    n_queries, n_keys = problem.query.shape[-2], problem.key.shape[-2]
    keys = problem.key[key_at][key_rows].double()
    values = problem.value[key_at][key_rows].double()
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    step = max(1, _BLOCK_ELEMENTS // (n_keys if lse is None else 1024))
    for start in range(0, n_queries, step):
        rows = torch.arange(start, min(start + step, n_queries))
        grad = grad_out[at][rows].double()
        if lse is None:
            scores = problem.scores(at, key_at, rows)
            row_lse = torch.logsumexp(scores, dim=1, keepdim=True)
            row_out = torch.exp(scores - row_lse) @ problem.value[key_at].double()
            scores = scores[:, key_rows]
        else:
            row_lse = lse[at][rows].double().unsqueeze(1)
            row_out = out[at][rows].double()
            scores = problem.query[at][rows].double() @ keys.mT * problem.scale
            if problem.is_causal:
                scores.masked_fill_(key_rows > rows.unsqueeze(1), float("-inf"))
        p = torch.exp(scores - row_lse)
        delta = (grad * row_out).sum(dim=1, keepdim=True)
        dv += p.mT @ grad
        dk += (p * (grad @ values.mT - delta)).mT @ problem.query[at][rows].double()
    return dk * problem.scale, dv


class _Error:
    """Sums of squares of a difference and of what it should have been."""

    def __init__(self) -> None:
        self.difference = 0.0
        self.size = 0.0

    def add(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        self.difference += float((got.double() - expected).square().sum())
        self.size += float(expected.square().sum())

    def relative(self) -> float:
        return (self.difference / self.size) ** 0.5 if self.size else self.difference**0.5
