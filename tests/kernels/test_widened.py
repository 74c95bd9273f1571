"""Gradients of 16-bit calls by the operator in fp32: right, rounded once, in bounded memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers_attention import exact, inputs
from helpers_memory import usage

import quorum_attention as qa
from quorum_attention.kernels import cpu

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="calls would go to the GPU"),
]


@pytest.fixture
def widening(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Key heads at a time of each call that is widened; on processors that multiply fp16 too."""
    monkeypatch.setattr(cpu, "_multiplies_fp16", lambda: False)
    seen: list[int] = []

    widened = cpu._widened_gradients

    def watched(run: Any, heads: int, *given: Any) -> Any:
        seen.append(heads)
        return widened(run, heads, *given)

    monkeypatch.setattr(cpu, "_widened_gradients", watched)
    return seen


@pytest.mark.parametrize("number", range(24))
def test_against_float64(number: int, widening: list[int], monkeypatch) -> None:
    """Grouped heads, batches, masks, unequal widths, a few heads at a time."""
    draw = random.Random(number)
    torch.manual_seed(number)
    kv_heads, shared = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    dtype = torch.bfloat16 if shared > 1 and number % 2 else torch.float16
    n = draw.choice([100, 130])
    given = inputs(
        n, heads=kv_heads * shared, kv_heads=kv_heads, batch=(draw.choice([2, 3]),),
        head_dim=16, value_dim=draw.choice([16, 24]), dtype=dtype,
    )  # fmt: skip
    call: dict[str, Any] = {"is_causal": draw.random() < 0.5}
    if draw.random() < 0.4:
        shape = [draw.choice([1, m]) for m in (*given.query.shape[:2], n, n)]
        call["mask"] = torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -torch.inf).to(dtype)
    monkeypatch.setattr(cpu, "_WIDENED_BYTES", draw.choice([1 << 19, 1 << 20, 1 << 30]))
    wanted = exact(given, gradients=True, **call).grads
    leaves = [t.requires_grad_() for t in given.three]
    out = qa.attention(
        *leaves, call.get("mask"), is_causal=call["is_causal"], enable_gqa=shared > 1
    )
    grads = torch.autograd.grad(out, leaves, given.grad_out)
    assert wanted is not None
    for mine, reference, like in zip(grads, wanted, leaves, strict=True):
        assert mine.dtype == dtype
        assert mine.shape == like.shape
        apart = (mine.double() - reference).norm() / reference.norm()
        # One rounding of each number, and those of the output in delta.
        assert float(apart) < 0.6 * torch.finfo(dtype).eps
    assert widening or cpu._WIDENED_BYTES == 1 << 19


@pytest.mark.parametrize("shape", [(150, 8, 2), (256, 8, 2), (600, 4, 4), (300, 4, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_what_the_planner_counts(shape, causal, widening) -> None:
    n, heads, kv_heads = shape
    given = inputs(n, heads=heads, kv_heads=kv_heads, head_dim=64, dtype=torch.float16)
    out, lse = qa.attention_with_lse(*given.three, is_causal=causal, enable_gqa=True)

    def call() -> object:
        return qa.attention_backward(
            given.grad_out, *given.three, out, lse, is_causal=causal, enable_gqa=True
        )

    call()
    plan = qa.plan(
        n, heads=heads, kv_heads=kv_heads, head_dim=64, dtype=torch.float16, device="cpu",
        levels=(), backward=True, is_causal=causal,
    )  # fmt: skip
    assert widening
    assert usage(call).peak <= plan.peak_bytes
