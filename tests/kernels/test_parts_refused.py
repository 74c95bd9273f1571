"""Parts under a mask beside a bias: the tiled loop runs those that the operator does
not take, and no others."""

from __future__ import annotations

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.kernels.reference import TiledKernel
from quorum_attention.kernels.task_tensors import Statistics, TaskTensors


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


@pytest.mark.parametrize("depth", [0, 1])
def test_a_forward_is_not_asked_for_as_if_for_gradients(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan counts the operator's bytes. The loop ran, which takes far longer."""

    query, key, value = torch.randn(3, 1, 2, 200, 16)
    bias = torch.randn(1, 2, 1, 200)
    mask = qa.Mask(causal=True, window=50, bias=bias)
    kernel = _NarrowGradients()

    def call(kernel: CpuKernel) -> torch.Tensor:
        with torch.no_grad():
            return qa.attention(query, key, value, mask, kernel=kernel, depth=depth)

    def refuse(self: TiledKernel, task: TaskTensors, state: Statistics) -> None:
        raise AssertionError("the tiled loop runs")

    call(kernel)  # it is compared with the reference
    expected = call(CpuKernel())
    monkeypatch.setattr(TiledKernel, "forward", refuse)
    torch.testing.assert_close(call(kernel), expected)
