"""Where results are not finite, given inputs that are not: the least and the most there may be."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_attention import Inputs

Flags = tuple[torch.Tensor, ...]


def skip_where_rows_touch(kernel: str, dtype: torch.dtype) -> None:
    """On processors with AMX torch's bf16 products let a row of NaN reach the row before it."""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if kernel == "cpu" and dtype == torch.bfloat16 and ask is not None and ask():
        pytest.skip("torch's bf16 products on AMX mix rows of NaN (docs/random-calls.md)")


def least(given: Inputs, kept: torch.Tensor, scale: float) -> Flags:
    """Of out, lse and the gradients, with sums over kept pairs alone and P = exp(S - lse): a NaN
    or an infinity goes where it is used, and nowhere else."""
    q, k, v, do = (t.double() for t in (*given.three, given.grad_out))

    def product(pairs: torch.Tensor, rows: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        every = pairs.unsqueeze(-1) * rows.unsqueeze(-3)
        return torch.where(used.unsqueeze(-1), every, 0.0).sum(dim=-2)

    scores = torch.where(kept, scale * (q @ k.mT), -math.inf)
    lse = scores.logsumexp(dim=-1)
    p = torch.where(
        kept, torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]), 0.0
    )
    out = product(p, v, kept)
    ds = torch.where(kept, p * (do @ v.mT - (do * out).sum(dim=-1, keepdim=True)), 0.0)
    grads = (product(ds, k, kept), product(ds.mT, q, kept.mT), product(p.mT, do, kept.mT))
    return _flags(out, lse, *grads)


def most(given: Inputs, kept: torch.Tensor, scale: float) -> Flags:
    """Of the same, by autograd through a masked softmax: NaN times a probability of 0 is NaN."""
    q, k, v = (t.double().requires_grad_() for t in given.three)
    scores = scale * (q @ k.mT) + torch.zeros(kept.shape).masked_fill_(~kept, -math.inf)
    out = scores.softmax(dim=-1) @ v
    grads = torch.autograd.grad(out, (q, k, v), given.grad_out.double())
    return _flags(out.detach(), scores.detach().logsumexp(dim=-1), *grads)


def _flags(*results: torch.Tensor) -> Flags:
    return tuple(map(not_finite, results))


def not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """NaN or infinite; an lse of -inf is that of a row without keys, and as it should be."""
    rows = tensor.dim() == 3
    return tensor.isnan() | (tensor == torch.inf) if rows else ~tensor.isfinite()


def assert_between(results: tuple[torch.Tensor, ...], least: Flags, most: Flags, what: str) -> None:
    """None that the reference has has disappeared, and none has appeared."""
    names = ("out", "lse", "grad_query", "grad_key", "grad_value")
    for name, result, some, every in zip(names, results, least, most, strict=True):
        found = not_finite(result)
        # The two differ both ways: a row with a score of +inf is NaN throughout in a softmax.
        assert not bool((some & every & ~found).any()), f"{name} lost a NaN: {what}"
        assert not bool((found & ~some & ~every).any()), f"{name} has a NaN of its own: {what}"
