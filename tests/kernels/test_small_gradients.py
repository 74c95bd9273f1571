"""Gradients of small calls by the reference, from whole rows, against float64."""

from __future__ import annotations

import random

import pytest
import torch
from helpers_attention import Inputs, exact

import quorum_attention as qa
from quorum_attention.kernels.protocol import Call, Saved
from quorum_attention.kernels.reference import SMALL, whole_backward


def small_gradients(call: Call, saved: Saved) -> tuple[torch.Tensor, ...]:
    return whole_backward(call, saved, SMALL)


def call(batch: int, heads: int, kv_heads: int, nq: int, nk: int, d: int, dv: int):  # type: ignore[no-untyped-def]
    query, grad_out = torch.randn(batch, heads, nq, d), torch.randn(batch, heads, nq, dv)
    return (
        query,
        torch.randn(batch, kv_heads, nk, d),
        torch.randn(batch, kv_heads, nk, dv),
        grad_out,
    )


def expected(query, key, value, grad_out, bias, causal, scale):  # type: ignore[no-untyped-def]
    """(out, lse, gradients) in float64."""
    given = Inputs(query, key, value, grad_out)
    found = exact(given, mask=bias, is_causal=causal, scale=scale, gradients=True)
    return found.out, found.lse, found.grads


@pytest.mark.parametrize("number", range(40))
def test_against_float64(number: int) -> None:
    draw = random.Random(number)
    kv_heads, causal = draw.choice([1, 2, 3]), draw.random() < 0.4
    nq, nk = draw.choice([1, 2, 7, 16]), draw.choice([1, 3, 8, 17])
    sizes = (draw.choice([1, 2]), kv_heads * draw.choice([1, 2, 4]), kv_heads, nq, nk)
    query, key, value, grad_out = call(*sizes, draw.choice([1, 5, 16]), draw.choice([1, 8]))
    scale = draw.choice([0.3, -0.4, 0.0, 4.0])
    bias = None
    if draw.random() < 0.5:
        shape = [draw.choice([1, n]) for n in (*sizes[:2], nq, nk)]
        bias = torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -torch.inf)
    out, lse, grads = expected(query, key, value, grad_out, bias, causal, scale)
    lse = lse.float().masked_fill(lse == -torch.inf, 0.0)
    given = Call(query, key, value, causal, scale, bias), Saved(grad_out, out.float(), lse)
    for mine, theirs, like in zip(small_gradients(*given), grads, (query, key, value), strict=True):
        assert mine.shape == like.shape
        torch.testing.assert_close(mine.double(), theirs, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_that_has_no_weight_on_these_keys_adds_nothing(dtype: torch.dtype) -> None:
    """However large its lse: rounding of that is no reason to take 0 for all of its weight."""
    query, key, value, grad_out = (t.to(dtype) for t in call(1, 1, 1, 4, 5, 8, 8))
    out = torch.randn(1, 1, 4, 8, dtype=dtype)
    for lse in (1e3, 1e5, 3e6, 1e9, 1e18):
        rows = torch.full((1, 1, 4), lse, dtype=dtype)
        found = small_gradients(Call(query, key, value), Saved(grad_out, out, rows))
        assert all(bool((t == 0).all()) for t in found), lse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("budget", [None, "8MiB"])
def test_a_plan_takes_this_way_too(dtype: torch.dtype, budget: str | None) -> None:
    """Values of one column: no other column can carry what delta has more than 16 bits."""
    query, key, value, grad_out = (t.to(dtype) for t in call(2, 2, 2, 32, 64, 1, 1))
    three = [t.requires_grad_() for t in (6 * query, 9 * key, value)]
    plain = torch.autograd.grad(qa.attention(*three), three, 3000 * grad_out)
    out = qa.attention(*three, budget=budget, report=qa.Report(), devices="cpu")
    found = torch.autograd.grad(out, three, 3000 * grad_out)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)


def test_gradients_that_are_not_finite_are_left_to_the_kernel() -> None:
    """A value of NaN that no other row sees makes no NaN in the other rows' gradients."""
    query, key, value, grad_out = (t.bfloat16() for t in call(1, 1, 1, 4, 4, 8, 8))
    value[0, 0, 3] = torch.nan
    three = [t.requires_grad_() for t in (query, key, value)]
    out = qa.attention(*three, is_causal=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(*three, is_causal=True)
    got = torch.autograd.grad(out, three, grad_out)[0]
    wanted = torch.autograd.grad(theirs, three, grad_out)[0]
    assert torch.equal(got.isnan(), wanted.isnan())
