"""The gradient of a mask that a kernel's own operator computes, summed over what the mask spans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.attention import error

import quorum_attention as qa
from quorum_attention.kernels.cpu import CpuKernel


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of gradients that the kernel of the CPU returns, as the memory-efficient one does on a
    GPU."""
    shapes: list[tuple[int, ...]] = []

    def bias_gradient(self: Any, call: Any, saved: Any) -> torch.Tensor:
        scores = call.query @ call.key.mT * call.scale + call.bias
        probabilities = (scores - saved.lse[..., None]).exp()
        products = saved.grad_out @ call.value.mT
        delta = (saved.grad_out * saved.out).sum(-1, keepdim=True)
        grad: torch.Tensor = probabilities * (products - delta)
        shapes.append(tuple(grad.shape))
        return grad

    monkeypatch.setattr(CpuKernel, "bias_gradient", bias_gradient)
    return shapes


def gradient(bias: torch.Tensor, **options: Any) -> torch.Tensor:
    """Of a bias, in a call of the same inputs every time."""
    torch.manual_seed(0)
    query, key, value, grad_out = torch.randn(4, 5, 2, 7, 8).unbind()
    out = qa.attention(query, key, value, bias, **options)
    (grad,) = torch.autograd.grad(out, [bias], grad_out)
    return grad


@pytest.mark.parametrize(
    "shape",
    [(5, 2, 7, 7), (1, 2, 7, 7), (2, 7, 7), (7, 7), (5, 1, 1, 7), (1, 1), (5, 1, 7, 1)],
    ids=str,
)
def test_it_is_that_of_tiles(shape: tuple[int, ...], calls: list[tuple[int, ...]]) -> None:
    bias = torch.randn(shape, requires_grad=True)
    grad = gradient(bias)
    assert calls == [(5, 2, 7, 7)]
    report = qa.Report()
    tiles = gradient(bias, budget="64MiB", report=report)
    assert len(calls) == 1
    assert report.backward is not None
    assert "tile by tile" in report.mask_gradient[0]
    assert error(grad, tiles) < 1e-5


def test_other_calls_have_tiles(calls: list[tuple[int, ...]]) -> None:
    """Of several batch dimensions, causal, and with dropout."""
    bias = torch.randn(7, 7, requires_grad=True)
    gradient(bias, is_causal=True)
    gradient(bias, dropout_p=0.1)
    rows = torch.randn(2, 3, 2, 7, 8)
    qa.attention(rows, rows, rows, bias).sum().backward()
    assert not calls
