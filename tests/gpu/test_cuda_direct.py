"""Calls like one before on a GPU (random ones: test_cuda_masks.py)."""

from __future__ import annotations

import gc

import pytest
import torch

import quorum_attention as qa
from quorum_attention import direct

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> None:
    direct._CACHE.clear()


def test_a_long_window_is_remembered_and_a_second_derivative_is_refused() -> None:
    q, k, v = (torch.randn(1, 8, 40_000, 64, device="cuda").bfloat16() for _ in range(3))
    q.requires_grad_()
    mask = qa.Mask(causal=True, window=512)
    first = qa.attention(q, k, v, mask)
    assert [len(request.decisions or ()) for request in direct._CACHE.values()] == [1]
    second = qa.attention(q, k, v, mask)
    assert torch.equal(first, second)
    assert type(second.grad_fn).__name__ == "AttentionBackward"
    (grad,) = torch.autograd.grad(second.float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(grad.float().sum(), q)


def test_where_memory_has_run_out_since_the_call_is_planned_anew() -> None:
    # Its output fits in nothing that other tests have left free.
    q, k, v = (torch.randn(1, 8, 262_144, 64, device="cuda").half() for _ in range(3))
    want = qa.attention(q, k, v, is_causal=True)
    assert torch.equal(want, qa.attention(q, k, v, is_causal=True))
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    # Less than an output is free.
    held = torch.cuda.memory_reserved() + (32 << 20)
    torch.cuda.set_per_process_memory_fraction(held / total)
    try:
        with pytest.raises((qa.BudgetError, qa.OutOfMemoryError)):
            qa.attention(q, k, v, is_causal=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for _ in range(2):
        assert torch.equal(want, qa.attention(q, k, v, is_causal=True))
