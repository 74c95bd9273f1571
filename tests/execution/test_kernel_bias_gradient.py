"""The gradient of a mask that a kernel's own operator computes, summed over what the
mask spans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.attention import error

import quorum_attention as qa
from quorum_attention.kernels.cpu import CpuKernel


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of gradients that the kernel of the CPU returns, as the memory-efficient
    one does on a GPU."""
    shapes: list[tuple[int, ...]] = []

    def backward(self: Any, call: Any, saved: Any) -> tuple[torch.Tensor, ...]:
        scores = call.query @ call.key.mT * call.scale + call.bias
        probabilities = (scores - saved.lse[..., None]).exp()
        products = saved.grad_out @ call.value.mT
        delta = (saved.grad_out * saved.out).sum(-1, keepdim=True)
        grad: torch.Tensor = probabilities * (products - delta)
        shapes.append(tuple(grad.shape))
        return (*self.whole_backward(call, saved), grad)

    monkeypatch.setattr(
        CpuKernel, "gives_bias_gradient", lambda _, shape: not shape.is_causal
    )
    monkeypatch.setattr(CpuKernel, "whole_backward_with_bias", backward)
    return shapes


def gradients(
    bias: torch.Tensor, *, of_inputs: bool = True, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Of a bias, and of query, key and value, in a call of the same inputs every
    time."""
    torch.manual_seed(0)
    query, key, value, grad_out = torch.randn(4, 5, 2, 7, 8).unbind()
    inputs = [
        tensor.detach().requires_grad_(of_inputs) for tensor in (query, key, value)
    ]
    out = qa.attention(*inputs, bias, **options)
    return torch.autograd.grad(out, [bias, *inputs] if of_inputs else [bias], grad_out)


@pytest.mark.parametrize(
    "shape",
    [(5, 2, 7, 7), (1, 2, 7, 7), (2, 7, 7), (7, 7), (5, 1, 1, 7), (1, 1), (5, 1, 7, 1)],
    ids=str,
)
@pytest.mark.parametrize("of_inputs", [True, False], ids=["all", "bias alone"])
def test_it_is_that_of_tiles(
    shape: tuple[int, ...], of_inputs: bool, calls: list[tuple[int, ...]]
) -> None:
    """Also in a call like an earlier one, which is not checked again."""
    bias = torch.randn(shape, requires_grad=True)
    report = qa.Report()
    tiles = gradients(bias, of_inputs=of_inputs, budget="64MiB", report=report)
    assert not calls
    assert report.backward is not None
    assert "tile by tile" in report.mask_gradient[0]
    for n_calls in (1, 2, 3):
        grads = gradients(bias, of_inputs=of_inputs)
        assert calls == [(5, 2, 7, 7)] * n_calls
        for grad, expected in zip(grads, tiles, strict=True):
            assert error(grad, expected) < 1e-5


def test_out_of_memory_it_is_computed_by_tiles(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel call that ran out of memory is no error: the backward is planned
    instead."""
    bias = torch.randn(2, 7, 7, requires_grad=True)
    expected = gradients(bias)

    def failing(self: Any, call: Any, saved: Any) -> None:
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(CpuKernel, "whole_backward_with_bias", failing)
    for grad, other in zip(gradients(bias), expected, strict=True):
        assert error(grad, other) < 1e-5
    assert len(calls) == 1


def test_other_calls_have_tiles(calls: list[tuple[int, ...]]) -> None:
    """Calls of several batch dimensions, causal ones, those with dropout, and backwards
    that are not asked for the gradient of the mask."""
    bias = torch.randn(7, 7, requires_grad=True)
    gradients(bias, is_causal=True)
    gradients(bias, dropout_p=0.1)
    rows = torch.randn(2, 3, 2, 7, 8)
    qa.attention(rows, rows, rows, bias).sum().backward()
    out, lse = qa.attention_with_lse(rows[0], rows[0], rows[0], bias)
    grads = qa.attention_backward(
        out.detach(), rows[0], rows[0], rows[0], out, lse, bias
    )
    assert len(grads) == 3
    assert not calls
