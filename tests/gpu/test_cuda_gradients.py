"""Gradients of a mask on a GPU, and fp16 ones that overflow. (Random calls draw the first for every
kernel and route, and those of the log-sum-exp.)"""

from __future__ import annotations

import pytest
import torch
from helpers_attention import assert_close, inputs
from helpers_fa4 import FA4

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


@pytest.mark.parametrize("kernel", [FA4, "auto", "efficient", "flash", "cudnn", "native", "dense"])
@pytest.mark.parametrize("n_keys", [4, 157])
@pytest.mark.parametrize("expanded", [False, True])
def test_an_fp16_overflow_with_the_lse_in_host_memory(
    kernel: str, n_keys: int, expanded: bool
) -> None:
    """One call over the whole; where a gradient is not finite, its heads are computed again."""
    q, grad_out = (torch.ones(1, 2, 157, 64, dtype=torch.float16, device="cuda") for _ in "qg")
    k, v = (torch.ones(1, 2, n_keys, 64, dtype=torch.float16, device="cuda") for _ in "kv")
    q, v = torch.randn_like(q), 30 * torch.randn_like(v)
    k = torch.randn_like(k[:, :1]).expand_as(k) if expanded else torch.randn_like(k)
    grad_out.mul_(torch.logspace(-3, 4.75, 157, device="cuda")[:, None])
    out, lse = qa.attention_with_lse(q, k, v, kernel=kernel)
    found = qa.attention_backward(grad_out, q, k, v, out, lse.cpu(), kernel=kernel)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    p = (leaves[0] @ leaves[1].mT / 8).softmax(dim=-1)
    exact = torch.autograd.grad(p @ leaves[2], leaves, grad_out.double())
    assert any(bool((right.abs() > 7e4).any()) for right in exact), "nothing overflows"
    assert bool((exact[0].abs() < 6e4).any())
    for mine, right in zip(found, exact, strict=True):
        fits = right.abs() < 6e4
        assert bool(mine[fits].isfinite().all())
        largest = right.abs().amax(dim=-1, keepdim=True)
        off = (mine.double() - right).abs() / largest.clamp(min=1e-4 * float(largest.max()))
        assert bool((off[fits] < 3e-2).all())
