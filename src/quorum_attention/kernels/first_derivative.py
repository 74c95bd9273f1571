"""Backwards that have no derivative of their own, and say so.

torch's ``once_differentiable`` says so only where the upstream gradient requires one. Of a sum it
does not: then what came out was a constant, and a penalty on gradients lost its part without a
word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_derivative(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the ``backward`` of an autograd function one whose derivative is an error.

    Args:
        name: of what the user called.
    """

    def wrapped(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *grad_outputs: Any) -> Any:
            recorded = torch.is_grad_enabled()
            with torch.no_grad():
                grads = backward(ctx, *grad_outputs)
            if not recorded:
                return grads
            anchor = torch.zeros((), device="cpu", requires_grad=True)
            given = [grad for grad in grads if grad is not None]
            made = iter(_Last.apply(name, anchor, *given))  # type: ignore[no-untyped-call]
            return tuple(None if grad is None else next(made) for grad in grads)

        return once

    return wrapped


class _Last(torch.autograd.Function):
    """Gradients as they are; ``anchor`` makes them require one."""

    @staticmethod
    def forward(
        ctx: Any, name: str, anchor: torch.Tensor, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.name = name
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise NotImplementedError(f"second derivatives of {ctx.name} are not supported")


__all__ = ["first_derivative"]
