"""Calls like one before on a GPU: the second and third time they are what they were the first."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers_masks import exact, off

import quorum_attention as qa
from quorum_attention import direct

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: (5e-5, 2e-4), torch.float16: (6e-3, 2e-2), torch.bfloat16: (4e-2, 0.1)}
MASKS = (
    None,
    qa.Mask(causal=True, window=100),
    qa.Mask(causal="lower_right"),
    qa.Mask(window=(40, 7), offset=3),
    qa.Mask(chunk=128, causal=True),
)


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> None:
    direct.forget_all()


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_again_and_again_against_float64(seed: int) -> None:
    draw = random.Random(random.random() + seed)
    kv_heads = draw.choice([1, 2])
    heads, batch = kv_heads * draw.choice([1, 3]), draw.choice([1, 2])
    mask = draw.choice(MASKS)
    n_queries = draw.choice([64, 300, 1024])
    n_keys = n_queries if draw.random() < 0.6 else draw.choice([5, 200, 900])
    is_causal = mask is None and n_queries == n_keys and draw.random() < 0.7
    dtype, dim = draw.choice(list(TOLERANCE)), draw.choice([64, 128, 40])
    shapes = ((heads, n_queries), (kv_heads, n_keys), (kv_heads, n_keys), (heads, n_queries))
    print(mask, is_causal, dtype, dim, shapes)
    of_results, of_grads = TOLERANCE[dtype]
    for time in range(3):
        q, k, v, grad_out = (torch.randn(batch, h, n, dim).to(dtype) for h, n in shapes)
        if time == 2:
            grad_out = torch.full((), 0.5, dtype=dtype).expand(grad_out.shape)
        rules = mask if mask is not None else qa.Mask(causal=is_causal)
        want = exact(q, k, v, grad_out, rules, 0.125)
        leaves = [t.cuda().requires_grad_() for t in (q, k, v)]
        options: dict[str, Any] = {"is_causal": is_causal, "scale": 0.125, "enable_gqa": True}
        out = qa.attention(*leaves, mask, **options)
        grads = torch.autograd.grad(out, leaves, grad_out.cuda())
        assert off(out, want.out) <= of_results
        for grad, wanted in zip(grads, want.grads, strict=True):
            assert off(grad, wanted) <= of_grads
        with torch.no_grad():
            alone = qa.attention(*leaves, mask, **options)
        assert off(alone, want.out) <= of_results


def test_a_transformation_after_a_plain_call_is_what_it_would_be_without() -> None:
    q, k, v = (torch.randn(2, 2, 64, 32, device="cuda").half() for _ in range(3))
    want = qa.attention(q, k, v)
    leaf = q.clone().requires_grad_()
    (of_query,) = torch.autograd.grad(qa.attention(leaf, k, v).sum(), leaf)
    mapped = torch.vmap(qa.attention)(q[:, None], k[:, None], v[:, None])
    torch.testing.assert_close(mapped[:, 0], want, rtol=1e-2, atol=1e-2)
    grad = torch.func.grad(lambda x: qa.attention(x, k, v).sum())(q)
    torch.testing.assert_close(grad, of_query, rtol=1e-2, atol=1e-2)


def test_a_long_window_is_remembered_and_a_second_derivative_is_refused() -> None:
    q, k, v = (torch.randn(1, 8, 40_000, 64, device="cuda").bfloat16() for _ in range(3))
    q.requires_grad_()
    mask = qa.Mask(causal=True, window=512)
    first = qa.attention(q, k, v, mask)
    assert [type(known) for known in direct._CACHE.values()] == [direct.DirectCall]
    second = qa.attention(q, k, v, mask)
    assert torch.equal(first, second)
    assert type(second.grad_fn).__name__ == "AttentionBackward"
    (grad,) = torch.autograd.grad(second.float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(grad.float().sum(), q)


def test_where_memory_has_run_out_since_the_call_is_planned_anew() -> None:
    q, k, v = (torch.randn(1, 8, 65_536, 64, device="cuda").half() for _ in range(3))
    want = qa.attention(q, k, v, is_causal=True)
    assert torch.equal(want, qa.attention(q, k, v, is_causal=True))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    # Less than an output is free.
    held = torch.cuda.memory_reserved() + (32 << 20)
    torch.cuda.set_per_process_memory_fraction(held / total)
    try:
        with pytest.raises((qa.BudgetError, qa.OutOfMemoryError)):
            qa.attention(q, k, v, is_causal=True)
        assert direct.DirectCall not in map(type, direct._CACHE.values())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for _ in range(2):
        assert torch.equal(want, qa.attention(q, k, v, is_causal=True))
