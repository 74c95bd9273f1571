"""What autograd and torch.func want of a call, and what of that a call can give."""

from __future__ import annotations

import torch


def records(*inputs: torch.Tensor) -> bool:
    """Whether autograd has to see the call: for gradients, or for a transformation, which asks here
    for what it may not have."""
    return (
        (torch.is_grad_enabled() and True in [t.requires_grad for t in inputs])
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def refuse_out() -> None:
    """A result of the caller's has no room for dimensions that a transformation adds.

    Raises:
        NotImplementedError: under torch.func.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("out cannot be given under torch.func transformations")


def refuse_transforms(*inputs: torch.Tensor) -> None:
    """What is no function of autograd's would lose what a transformation wants of it.

    Raises:
        NotImplementedError: under torch.func, or for dual tensors.
    """
    duals = torch.autograd.forward_ad
    if torch._C._are_functorch_transforms_active() or (
        duals._current_level >= 0 and any(duals.unpack_dual(t).tangent is not None for t in inputs)
    ):
        raise NotImplementedError(
            "attention_backward takes no part in torch.func transformations, nor in forward-mode "
            "derivatives: take the gradients of attention instead"
        )
