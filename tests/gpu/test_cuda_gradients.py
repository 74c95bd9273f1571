"""Gradients of a mask on a GPU, and fp16 ones that overflow. (Random calls draw the first for every
kernel and route, and those of the log-sum-exp.)"""

from __future__ import annotations

import pytest
import torch
from helpers_attention import assert_close, inputs

import quorum_attention as qa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_mask_gradient_is_bitwise_the_same_each_time(dtype: torch.dtype) -> None:
    given = inputs(3000, heads=4, head_dim=64, dtype=dtype, device="cuda")
    mask = torch.randn(4, 1, 3000, device="cuda").to(dtype)
    made = qa.attention_with_lse(*given.three, mask)
    first, second = (
        qa.attention_backward(given.grad_out, *given.three, *made, mask, grad_mask=True)[3]
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_a_mask_gradient_within_its_budget() -> None:
    """More than the budget of gradient in host memory, and tiles on the GPU."""
    n = 8192
    given = inputs(n, heads=4, head_dim=64, dtype=torch.bfloat16)
    mask = torch.randn(4, n, n, dtype=torch.bfloat16)
    budget = 96 << 20
    assert mask.nbytes > 4 * budget
    made = qa.attention_with_lse(*given.three, mask, budget=budget)
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")  # cuBLAS's own workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    *_, found = qa.attention_backward(
        given.grad_out, *given.three, *made, mask, grad_mask=True, budget=budget
    )
    assert torch.cuda.max_memory_allocated() - before <= budget
    assert found.device == mask.device
    assert found.isfinite().all()
    rows = slice(4000, 4064)
    q, k, v, do = (t[:, 1].double() for t in (*given.three, given.grad_out))
    s = q[:, rows] @ k.mT / 8 + mask[1, rows].double()
    p = s.softmax(dim=-1)
    dp = do[:, rows] @ v.mT
    assert_close(found[1, rows], (p * (dp - (p * dp).sum(-1, keepdim=True)))[0], 2e-3)
