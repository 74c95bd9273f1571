"""A call under autograd, torch.func and forward-mode: what is recorded, and what is
refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quorum_attention.call.validation import check_kind
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.task_tensors import Indices
from quorum_attention.kernels.torch_private import (
    capturing,
    has_tangent,
    has_transforms,
    no_torch_modes,
)


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records what is computed from one of ``tensors``."""
    if not torch.is_grad_enabled():
        return False
    return True in [t.requires_grad for t in tensors if t is not None]


def is_recorded(*inputs: torch.Tensor | None) -> bool:
    """Tell whether a call has to be a function of autograd's.

    It has to be one for gradients, and under a transformation or forward-mode, where
    that function works or raises its error.
    """
    return (
        needs_gradient(*inputs)
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def as_readable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor of a mask without the wrappers of torch.func's derivatives.

    Its numbers are read now, and it gets no gradient.

    Raises:
        NotImplementedError: it has no dense memory of its own, or torch.vmap maps over
            it, by name.
    """
    check_kind(tensor, f"Mask.{name}")
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if functorch.is_batchedtensor(tensor):
        raise NotImplementedError(
            f"torch.vmap cannot map over Mask.{name}: only over query, key, value, "
            "attn_mask, Mask.bias and Mask.sinks; make the dimension that is mapped "
            "one of the batch"
        )
    return tensor


def refuse_learned(
    kernel: InnerKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    device: torch.device,
) -> None:
    """Refuse functions of the user's whose results have a gradient that would be lost.

    No walk over a function's code finds all tensors that it reads. So it is called for
    a few pairs, as it will be, and its result says whether autograd, forward-mode or
    torch.func follow it.

    Raises:
        NotImplementedError: a function of ``kernel`` reads a tensor that requires a
            gradient or has a tangent, or one of a transformation that is under way.
    """
    results = results_for_few_pairs(kernel, query, key, value, device)
    if not results:
        return
    captures_wrapper = any(
        map(torch._C._functorch.is_functorch_wrapped_tensor, kernel.captured())
    )
    if captures_wrapper or any(map(_is_followed, results)):
        raise NotImplementedError(
            f"a function of kernel {kernel.name!r} (Mask.keeps, mask_mod, score_mod, "
            "...) reads a tensor that would get no gradient, or one of a torch.func "
            "transformation: give it tensor.detach() from outside of the "
            "transformation, or make what it adds to the scores an attn_mask"
        )


def results_for_few_pairs(
    kernel: InnerKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    device: torch.device,
) -> Sequence[torch.Tensor]:
    """Call the users' functions of a kernel for a few pairs, as passes call them.

    Returns:
        Their results; none of a call without pairs, and while a CUDA graph is captured.

    Raises:
        TypeError: a function returns no bools where it must.
    """
    inputs = (query, key, value)
    if not kernel.called_back() or not all(tensor.numel() for tensor in inputs):
        return ()
    if capturing(device):
        return ()  # in a CUDA graph no copy from the host can be captured
    with no_torch_modes():
        rows = [_few_rows(tensor, device) for tensor in inputs]
        indices = _few_indices(query, key, device)
    return kernel.results_of_functions(
        rows[0],
        rows[1],
        rows[2],
        indices,
    )


def _few_rows(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return zeros like at most two rows of each head of the first batch entry."""
    heads, n_rows, dim = tensor.shape[-3:]
    return torch.zeros(
        1,
        heads,
        min(2, n_rows),
        dim,
        dtype=tensor.dtype,
        device=device,
    )


def _few_indices(
    query: torch.Tensor, key: torch.Tensor, device: torch.device
) -> Indices:
    """Return the indices of the first and the last query and key, for the first batch
    entry."""
    numbers = (
        [0],
        list(range(query.shape[-3])),
        sorted({0, query.shape[-2] - 1}),
        sorted({0, key.shape[-2] - 1}),
    )
    return Indices(*(torch.tensor(n, device=device) for n in numbers))


def _is_followed(result: Any) -> bool:
    """Tell whether autograd, forward-mode or torch.func follow the result of a
    function."""
    if not isinstance(result, torch.Tensor):
        return False
    is_mapped = torch._C._functorch.is_batchedtensor(result)
    return result.requires_grad or is_mapped or has_tangent(result)


def refuse_transforms(*inputs: torch.Tensor | None) -> None:
    """Refuse transformations of ``attention_backward``: it is no function of
    autograd's, so their derivatives and dimensions would be lost without an error.

    Raises:
        NotImplementedError: under torch.func, or for dual tensors.
    """
    if has_transforms() or has_tangent(inputs):
        raise NotImplementedError(
            "attention_backward takes no part in torch.func transformations, nor in "
            "forward-mode derivatives: take the gradients of attention instead"
        )


def refuse_derivative(number: Any, name: str) -> None:
    """Refuse a number with a forward-mode tangent, which would be lost.

    Args:
        number: an argument that is read as a number; it may be a tensor of one element.

    Raises:
        NotImplementedError: it has a tangent.
    """
    if has_tangent(number):
        raise NotImplementedError(
            f"{name} is read as a number and has no derivative: give float({name})"
        )
