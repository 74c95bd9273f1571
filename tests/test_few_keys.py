"""A few tokens, rows of nearly one key, large values: as exact as torch's own call.

There dS = P (dP - delta) is the difference of two large numbers, 0 where P is 1, and whatever delta
was rounded to is what is left of it. torch's own call holds all scores where its kernels refuse
(value_dim unlike head_dim, grouped heads), and has next to no error.
"""

from __future__ import annotations

import random

import pytest
import torch
from helpers_attention import Inputs, exact
from torch.nn.functional import scaled_dot_product_attention as sdpa

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUTES = {
    "auto": {},
    "slots": {"over_inputs": False},
    "dense": {"kernel": "dense"},
}


def drawn(draw: random.Random, dtype: torch.dtype, is_causal: bool) -> Inputs:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 31))
    n, m = draw.choice([1, 2, 3, 4, 6, 8]), draw.choice([1, 2, 3, 4, 6, 8])
    m = n if is_causal else m
    head_dim = draw.choice([4, 16, 64])
    value_dim, kv_heads = draw.choice([head_dim, 8]), draw.choice([1, 2])
    heads = kv_heads * draw.choice([1, 1, 2])

    def normal(h: int, rows: int, width: int, size: float) -> torch.Tensor:
        return torch.randn(1, h, rows, width, generator=generator) * size

    value = normal(kv_heads, m, value_dim, 1.0).sign() * 9
    value += normal(kv_heads, m, value_dim, draw.choice([0.0, 0.3]))
    return Inputs(
        normal(heads, n, head_dim, draw.choice([1, 5, 20, 60])).to(dtype),
        normal(kv_heads, m, head_dim, 1.0).to(dtype),
        value.to(dtype),
        normal(heads, n, value_dim, draw.choice([1, 10])).to(dtype),
    )


def roundings(given: Inputs, reference) -> list[float]:
    """What one rounding of the output and the gradients may amount to: of the result in its dtype,
    and in fp32 of the products that it is a difference of."""
    q, k, v, do = (float(t.norm(dim=-1).max()) for t in (*given.three, given.grad_out))
    scale, wide = given.query.shape[-1] ** -0.5, torch.finfo(torch.float32).eps / 2
    narrow = torch.finfo(given.query.dtype).eps / 2
    # By as much as scores are off, their exponentials are.
    off = wide * (1 + scale * q * k)
    products = (v, scale * do * v * k, scale * do * v * q, do)
    results = (reference.out, *reference.grads)
    return [
        narrow * max(float(result.abs().max()), 1.0) + off * product
        for result, product in zip(results, products, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_errors_are_torchs(dtype: torch.dtype, route: str) -> None:
    """Some hundred draws; within twice torch's error and a few roundings."""
    seed = random.randrange(1 << 31)  # QUORUM_ATTENTION_SEED makes others of them
    draw = random.Random(seed)
    for number in range(100):
        is_causal = draw.random() < 0.4
        given = drawn(draw, dtype, is_causal)
        heads, kv_heads = given.query.shape[1], given.key.shape[1]
        reference = exact(given, is_causal=is_causal, gradients=True)
        leaves = [t.clone().requires_grad_() for t in given.three]
        out = sdpa(*leaves, is_causal=is_causal, enable_gqa=heads != kv_heads)
        torchs = (out.detach(), *torch.autograd.grad(out, leaves, given.grad_out))
        wanted, units = (reference.out, *reference.grads), roundings(given, reference)
        limits = [
            2 * float((theirs.double() - exactly).abs().max()) + 6 * unit
            for theirs, exactly, unit in zip(torchs, wanted, units, strict=True)
        ]
        sizes = {
            "heads": heads, "kv_heads": kv_heads, "n_keys": given.key.shape[2],
            "head_dim": given.query.shape[3], "value_dim": given.value.shape[3], "dtype": dtype,
            "layout": "balanced", "is_causal": is_causal, "levels": draw.choice([(), (3,), (7,)]),
            **ROUTES[route],
        }  # fmt: skip
        call = {"is_causal": is_causal, "enable_gqa": True}
        n = given.query.shape[2]
        ours, lse = qa.attention_with_lse(*given.three, plan=qa.plan(n, **sizes), **call)
        grads = qa.attention_backward(
            given.grad_out, *given.three, ours, lse,
            plan=qa.plan(n, backward=True, **sizes), **call,
        )  # fmt: skip
        for name, mine, exactly, limit in zip(
            ("out", "dq", "dk", "dv"), (ours, *grads), wanted, limits, strict=True
        ):
            off = float((mine.double() - exactly).abs().max())
            assert off <= limit, (seed, number, name, off, limit, sizes)
