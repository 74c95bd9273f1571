"""The derivative of a backward that has none is an error, whatever the upstream gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quorum_attention.kernels.torch_private import first_derivative


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shift: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3 + shift

    @staticmethod
    @first_derivative("cube")
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad_out * 3 * x**2, None


def test_a_penalty_on_gradients_does_not_lose_its_part() -> None:
    x = torch.randn(5, requires_grad=True)
    for upstream in (torch.ones(5), torch.ones(5, requires_grad=True)):
        (grad,) = torch.autograd.grad(_Cube.apply(x, 1.0), x, upstream, create_graph=True)
        assert torch.allclose(grad, 3 * x.detach() ** 2)
        with pytest.raises(NotImplementedError, match="second derivatives of cube"):
            (x.sum() + grad.square().sum()).backward()


def test_first_derivatives_are_as_ever() -> None:
    x = torch.randn(5, requires_grad=True)
    _Cube.apply(x, 1.0).sum().backward()
    assert x.grad is not None
    assert not x.grad.requires_grad
    assert torch.allclose(x.grad, 3 * x.detach() ** 2)
