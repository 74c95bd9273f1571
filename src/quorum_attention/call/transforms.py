"""Calls under autograd, torch.func and forward-mode: which are recorded, which are refused."""

from __future__ import annotations

from collections.abc import Iterator

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


def refuse_batched(*gradients: torch.Tensor | None) -> None:
    """Refuse gradients of ``is_grads_batched``, several in one: they are made by an older vmap of
    torch's, which knows few operators, and have no memory that a kernel could read.

    Raises:
        NotImplementedError: one of them is.
    """
    if any(tensor is not None and _is_batched(tensor) for tensor in gradients):
        raise NotImplementedError(
            "the gradients of attention cannot be taken with is_grads_batched (nor by "
            "torch.autograd.functional with vectorize=True): ask for one after the other, or use "
            "torch.func.jacrev on one device"
        )


_is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False)


def refuse_randomness(*inputs: torch.Tensor | None) -> None:
    """Refuse to draw under ``torch.vmap`` where it forbids that, or cannot be obeyed.

    Raises:
        RuntimeError: a vmap of randomness="error", as torch raises for its own functions.
        NotImplementedError: a vmap of randomness="different" that maps none of ``inputs``: the call
            is made once, so all would drop the same.
    """
    if not torch._C._are_functorch_transforms_active():
        return
    from torch._functorch import pyfunctorch

    mapped = {level for tensor in inputs if tensor is not None for level in _levels(tensor)}
    for inner in torch._C._functorch.get_interpreter_stack() or ():
        found = pyfunctorch.coerce_cinterpreter(inner)
        if not isinstance(found, pyfunctorch.VmapInterpreter):
            continue
        randomness = found.randomness()
        if randomness == "error":
            raise RuntimeError(
                "vmap: dropout_p draws a random seed; use randomness='different' (every entry "
                "drops other pairs) or 'same', or give dropout_seed"
            )
        if randomness == "different" and found.level() not in mapped:
            raise NotImplementedError(
                "dropout_p under torch.vmap of randomness='different' needs query, key, value or "
                "attn_mask to be mapped; a call that is the same for all entries drops the same"
            )


def _levels(tensor: torch.Tensor) -> Iterator[int]:
    """The levels of the transformations of which ``tensor`` is a wrapper."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        yield functorch.maybe_get_level(tensor)
        tensor = functorch.get_unwrapped(tensor)


def refuse_mapped(name: str, *dims: int | None) -> None:
    """Refuse torch.vmap over what cannot be mapped.

    Args:
        dims: over which it maps; None: none.

    Raises:
        NotImplementedError: it maps over one.
    """
    if any(dim is not None for dim in dims):
        raise NotImplementedError(
            f"torch.vmap cannot map over {name}: only over query, key, value and attn_mask (or "
            "Mask.bias); make the dimension that is mapped one of the batch"
        )


def unwrapped(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor``, whose numbers are read now and which gets no gradient, without the wrappers of
    torch.func's derivatives.

    Raises:
        NotImplementedError: torch.vmap maps over it.
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        refuse_mapped(name, 0 if functorch.is_batchedtensor(tensor) else None)
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

    Args:
        query, key, value: (*batch, heads, n, d); the first and the last row are taken.

    Raises:
        NotImplementedError: a function of ``kernel`` reads a tensor that requires a gradient or has
            a tangent, or one of a transformation that is under way.
    """
    if not (kernel.called_back() and all(t.numel() for t in (query, key, value))):
        return
    if capturing(device):  # no copy from the host can be captured
        return
    ends = _ends(query, device), _ends(key, device), _ends(value, device)
    queries, keys = (sorted({0, tensor.shape[-2] - 1}) for tensor in (query, key))
    numbers = ([0], list(range(query.shape[-3])), queries, keys)
    at = Indices(*(torch.tensor(each, device=device) for each in numbers))
    made = kernel.results_of_functions(ends[0], ends[1], ends[2], at)
    found = [result for result in made if isinstance(result, torch.Tensor)]
    functorch, duals = torch._C._functorch, torch.autograd.forward_ad
    read = kernel.captured()
    if any(map(functorch.is_functorch_wrapped_tensor, read)) or any(
        map(functorch.is_batchedtensor, found)
    ):
        raise NotImplementedError(
            f"a function of kernel {kernel.name!r} (Mask.keeps, mask_mod, score_mod, ...) reads a "
            "tensor of a torch.func transformation that is under way: it may read only tensors "
            "from outside of it"
        )
    dual = duals._current_level >= 0
    if any(t.requires_grad or (dual and duals.unpack_dual(t).tangent is not None) for t in found):
        raise NotImplementedError(
            f"kernel {kernel.name!r} has no gradient of tensors that its functions read, but the "
            "result of one of them requires it: give the function tensor.detach(), or make what it "
            "adds to the scores an attn_mask, which gets its gradient"
        )


def _ends(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The first and the last row of the first batch entry, (1, heads, 1 or 2, d), without what
    follows the tensor."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    with outside():
        entry = tensor.detach()[(0,) * (tensor.dim() - 3)].unsqueeze(0)
        return entry[..., :: max(1, entry.shape[-2] - 1), :].to(device).clone()


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
