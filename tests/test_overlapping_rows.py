"""Inputs whose rows begin within the row before, as windows over a signal do."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torchs

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("orders", [{}, {"depth": 1}, {"kernel": "cpu"}])
def test_forward_and_gradients(step: int, which: str, dtype: torch.dtype, orders) -> None:
    """Where a processor multiplies bf16, torch's operator for gradients refuses such rows."""
    given = {name: torch.randn(1, 2, 70, 32, dtype=dtype) for name in ("query", "key", "value")}
    signal = torch.randn(2 * 70 * step + 32, dtype=dtype)
    given[which] = signal.as_strided((1, 2, 70, 32), (0, 70 * step, step, 1))
    leaves = [tensor.detach().requires_grad_() for tensor in given.values()]
    copies = [tensor.detach().double().requires_grad_() for tensor in given.values()]
    out, exact = qa.attention(*leaves, **orders), torchs(*copies)
    upstream = torch.randn_like(exact).to(dtype)
    found = torch.autograd.grad(out, leaves, upstream)
    wanted = torch.autograd.grad(exact, copies, upstream.double())
    allowed = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for one, right in zip((out, *found), (exact, *wanted), strict=True):
        assert (one.double() - right).norm() <= allowed * right.norm()
