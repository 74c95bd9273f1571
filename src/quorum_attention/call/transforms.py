"""Calls under autograd, torch.func and forward-mode: which are recorded, which are refused."""

from __future__ import annotations

import torch

from quorum_attention.kernels.protocol import Indices, InnerKernel
from quorum_attention.kernels.torch_private import capturing, outside


def records(*inputs: torch.Tensor | None) -> bool:
    """Whether the call has to be a function of autograd's: for gradients, or under a transformation
    or forward-mode (where that function works or raises its error)."""
    return (
        (torch.is_grad_enabled() and True in [t.requires_grad for t in inputs if t is not None])
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def unwrapped(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor``, whose numbers are read now and which gets no gradient, without the wrappers of
    torch.func's derivatives.

    Raises:
        NotImplementedError: torch.vmap maps over it.
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            raise NotImplementedError(
                f"torch.vmap cannot map over {name}: only over query, key, value, attn_mask, "
                "Mask.bias and Mask.sinks; make the dimension that is mapped one of the batch"
            )
        if not functorch.is_gradtrackingtensor(tensor):
            break
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def refuse_learned(
    kernel: InnerKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    device: torch.device,
) -> None:
    """Refuse functions of the user's whose results have a gradient that would be lost.

    No walk over a function's code finds all tensors that it reads. So it is called for a few pairs,
    as it will be, and its result says whether autograd, forward-mode or torch.func follow it.

    Raises:
        NotImplementedError: a function of ``kernel`` reads a tensor that requires a gradient or has
            a tangent, or one of a transformation that is under way.
    """
    three = query, key, value
    # In a CUDA graph no copy from the host can be captured.
    if not (kernel.called_back() and all(t.numel() for t in three)) or capturing(device):
        return
    with outside():
        rows = [
            torch.zeros(
                1, t.shape[-3], min(2, t.shape[-2]), t.shape[-1], dtype=t.dtype, device=device
            )
            for t in three
        ]
        ends = [sorted({0, t.shape[-2] - 1}) for t in (query, key)]
        numbers = [0], list(range(query.shape[-3])), *ends
        at = Indices(*(torch.tensor(each, device=device) for each in numbers))
    functorch, duals = torch._C._functorch, torch.autograd.forward_ad
    dual = duals._current_level >= 0
    made = kernel.results_of_functions(rows[0], rows[1], rows[2], at)
    if any(map(functorch.is_functorch_wrapped_tensor, kernel.captured())) or any(
        result.requires_grad
        or functorch.is_batchedtensor(result)
        or (dual and duals.unpack_dual(result).tangent is not None)
        for result in made
        if isinstance(result, torch.Tensor)
    ):
        raise NotImplementedError(
            f"a function of kernel {kernel.name!r} (Mask.keeps, mask_mod, score_mod, ...) reads a "
            "tensor that would get no gradient, or one of a torch.func transformation: give it "
            "tensor.detach() from outside of the transformation, or make what it adds to the "
            "scores an attn_mask"
        )


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
