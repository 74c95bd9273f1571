"""Parts under a mask beside a bias that the operator does not take: the tiled loop runs
them."""

from __future__ import annotations

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.cpu import CpuKernel


class _NarrowGradients(CpuKernel):
    """As cuDNN: wider heads without gradients than with them."""

    def refusal(self, shape: CallShape) -> str | None:
        if shape.needs_grad and shape.width > 8:
            return "too wide for gradients"
        return super().refusal(shape)


class _SharedBiases(CpuKernel):
    """An operator whose biases are the same for all batch entries."""

    def refusal(self, shape: CallShape) -> str | None:
        if shape.bias is not None and shape.bias.batch:
            return "a bias for each entry"
        return super().refusal(shape)


@pytest.mark.parametrize("kernel", [_NarrowGradients, _SharedBiases])
@pytest.mark.parametrize("depth", [0, 1])
def test_triangles_off_the_diagonal(kernel: type[CpuKernel], depth: int) -> None:
    """The loop took each triangle to lie on the diagonal of its task: results were
    wrong by as much as they are."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 16) for n in (200, 333, 333))
    bias = torch.randn(1, 2, 1, 333)
    later = torch.ones(200, 333, dtype=torch.bool).triu(333 - 200 + 1)
    scores = query.double() @ key.double().mT * 16**-0.5 + bias
    exact = scores.masked_fill(later, -torch.inf).softmax(-1) @ value.double()
    mask = qa.Mask(causal="lower_right", bias=bias)
    with torch.no_grad():
        out = qa.attention(query, key, value, mask, kernel=kernel(), depth=depth)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
