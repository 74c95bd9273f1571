"""Calls under autograd, torch.func and forward-mode: which are recorded, which are refused."""

from __future__ import annotations

import torch


def records(*inputs: torch.Tensor) -> bool:
    """Whether the call has to be a function of autograd's: for gradients, or under a transformation
    or forward-mode (where that function works or raises its error)."""
    return (
        (torch.is_grad_enabled() and True in [t.requires_grad for t in inputs])
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def refuse_out() -> None:
    """Refuse ``out=`` under torch.func: it has no room for dimensions that a transformation adds.

    Raises:
        NotImplementedError: under torch.func.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("out cannot be given under torch.func transformations")


def refuse_transforms(*inputs: torch.Tensor) -> None:
    """Refuse transformations of ``attention_backward``: it is no function of autograd's, so their
    derivatives and dimensions would be lost without an error.

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
