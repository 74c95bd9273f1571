"""Small calls on a CPU, remembered as one kernel call: right."""

from __future__ import annotations

import random

import pytest
import torch
from helpers_attention import inputs

import quorum_attention as qa


def expected(query, key, value, grad_out, mask, causal, scale):  # type: ignore[no-untyped-def]
    """(out, gradients) in float64."""
    three = [t.detach().double().requires_grad_() for t in (query, key, value)]
    shared = query.shape[1] // key.shape[1]
    k, v = (t.repeat_interleave(shared, 1) for t in three[1:])
    scores = scale * three[0] @ k.mT
    kept = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(0 if causal else 10_000)
    if mask is not None and mask.dtype == torch.bool:
        kept = kept & mask
    elif mask is not None:
        scores, kept = scores + mask.double().clamp(min=-1e9), kept & (mask != -torch.inf)
    kept = kept.expand(scores.shape)
    alive = kept.any(-1, keepdim=True)
    p = scores.masked_fill(~kept, -torch.inf).masked_fill(~alive, 0.0).softmax(-1)
    out = p.masked_fill(~alive, 0.0) @ v
    return out.detach(), torch.autograd.grad(out, three, grad_out.double())


def strided(t: torch.Tensor, how: str) -> torch.Tensor:
    if how == "token major":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "sliced":
        return torch.nn.functional.pad(t, (2, 3))[..., 2:-3]
    return t


def upstream(shape, how: str) -> torch.Tensor:  # type: ignore[no-untyped-def]
    if how == "of a sum":
        return torch.ones(()).expand(shape)
    if how == "transposed":
        return torch.randn(*shape[:2], shape[3], shape[2]).mT
    return torch.randn(shape)


@pytest.mark.parametrize("number", range(150))
def test_against_float64(number: int) -> None:
    draw = random.Random(number)
    torch.manual_seed(number)
    batch, kv_heads, shared = draw.choice([1, 2]), draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 4])
    nq = draw.choice([1, 2, 5, 16, 33, 70])
    nk = draw.choice([nq, nq, 1, 3, 40])
    d, causal = draw.choice([1, 5, 8, 16]), draw.random() < 0.5
    heads = kv_heads * shared
    shapes = [(batch, heads, nq, d), (batch, kv_heads, nk, d), (batch, kv_heads, nk, d)]
    ways = ["plain", "plain", "token major", "sliced"]
    leaves = [torch.randn(s, requires_grad=True) for s in shapes]
    given = [strided(t, draw.choice(ways)) for t in leaves]
    mask = None
    if draw.random() < 0.6:
        size = [draw.choice([1, n]) for n in (batch, heads, nq, nk)]
        mask = torch.rand(size) < draw.choice([0.3, 0.9])
        if draw.random() < 0.5:
            mask = torch.randn(size).masked_fill(~mask, -torch.inf)
    scale = draw.choice([None, 0.3, 6.0])
    out = qa.attention(
        *given, mask, is_causal=causal, scale=scale, enable_gqa=shared > 1
    )  # fmt: skip
    grad_out = upstream(out.shape, draw.choice(["random", "of a sum", "transposed"]))
    grads = torch.autograd.grad(out, leaves, grad_out)
    exact, exact_grads = expected(
        *leaves, grad_out, mask, causal, d**-0.5 if scale is None else scale
    )
    for found, wanted in zip((out, *grads), (exact, *exact_grads), strict=True):
        assert torch.isfinite(found).all()
        apart = (found.detach().double() - wanted).abs().max()
        assert float(apart) <= 5e-5 * max(1.0, float(wanted.abs().max()))
    with torch.no_grad():
        again = qa.attention(*given, mask, is_causal=causal, scale=scale, enable_gqa=shared > 1)
    assert torch.equal(again, out)


def test_the_numbers_stay_after_a_backward_with_create_graph() -> None:
    plain = inputs(20)
    given = [t.requires_grad_() for t in plain.three]
    out = qa.attention(*given)
    once = torch.autograd.grad(out, given, plain.grad_out, retain_graph=True)
    again = torch.autograd.grad(out, given, plain.grad_out, create_graph=True)
    for one, other in zip(once, again, strict=True):
        assert torch.equal(one, other)
