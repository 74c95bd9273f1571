"""What a backward is given beside a forward's arguments, checked; where a pass has its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quorum_attention.argument_checks import shown, switch
from quorum_attention.call.request import Request, refuse_transforms
from quorum_attention.call.validation import Tensors, as_tensor, check_no_overlap, check_tensor
from quorum_attention.execution.kernel_layout import (
    are_kernel_readable,
    have_flattened_views,
    is_kernel_readable,
)
from quorum_attention.execution.problem import Placement
from quorum_attention.execution.upstream import rescaled_upstream_bytes
from quorum_attention.kernels.protocol import Three

_NAMES = ("grads[0]", "grads[1]", "grads[2]")


class BackwardInputs(NamedTuple):
    """What a backward is given beside the inputs.

    Attributes:
        grad_out, out: the upstream gradient and the output, (*batch, heads, n_queries, value_dim).
        lse: (*batch, heads, n_queries), natural log.
        grads: preallocated results, like query, key and value.
        grad_mask: whether the gradient of the mask is wanted too, or a preallocated tensor for it.
        grad_sinks: whether the gradient of the sinks is wanted too.
        grad_lse: the gradient of the log-sum-exp, like ``lse``; None is 0.
    """

    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grads: Three | None = None
    grad_mask: torch.Tensor | bool = False
    grad_sinks: bool = False
    grad_lse: torch.Tensor | None = None


def check_backward_inputs(  # noqa: C901
    tensors: Tensors,
    request: Request,
    backward_inputs: BackwardInputs,
    inputs: Sequence[torch.Tensor],
) -> BackwardInputs:
    """What a backward is given, checked against the call, with a dimension of heads.

    Args:
        backward_inputs: as its caller wrote it.
        inputs: query, key and value as they were given, before they were broadcast.

    Raises:
        ValueError, TypeError, NotImplementedError: one does not fit, by name.
    """
    query, key, value, mask = tensors[:4]
    rows, home = tuple(query.shape[:-1]), query.device
    wide = (*rows, value.shape[-1])
    shapes = {"grad_out": wide, "out": wide, "lse": rows, "grad_lse": rows}
    read: dict[str, Any] = {
        name: as_tensor(t, name)
        for name in shapes
        if (t := getattr(backward_inputs, name)) is not None
    }
    refuse_transforms(*tensors, *read.values())
    for name, tensor in read.items():
        read[name] = request.add_heads(tensor, len(shapes[name]) - 1)
        dtype = request.shape.state_dtype if name == "lse" else None
        check_tensor(read[name], shapes[name], name, home, dtype)
    filled: dict[str, Any] = {}
    if backward_inputs.grads is not None:
        if not isinstance(backward_inputs.grads, (tuple, list)) or len(backward_inputs.grads) != 3:
            raise TypeError(f"grads must be three tensors, got {shown(backward_inputs.grads)}")
        if any(i.shape != o.shape for i, o in zip(tensors[:3], inputs, strict=True)):
            raise NotImplementedError(
                "grads cannot be given for inputs that are broadcast, nor without a dimension of "
                "heads: leave them out, and their gradients are returned"
            )
        filled.update(zip(_NAMES, backward_inputs.grads, strict=True))
    if backward_inputs.grad_mask is not False:
        if mask is None or mask.dtype == torch.bool:
            what = "None" if mask is None else "a boolean mask"
            raise ValueError(f"grad_mask needs an additive attn_mask, got {what}")
        if backward_inputs.grad_mask is not True:
            filled["grad_mask"] = backward_inputs.grad_mask
    if switch(backward_inputs.grad_sinks, "grad_sinks") and tensors.sinks is None:
        raise ValueError("grad_sinks needs a Mask with sinks as attn_mask")
    if not filled:
        return backward_inputs._replace(**read)
    for name, result in filled.items():
        filled[name] = as_tensor(result, name, for_writing=True)
    for name, like in zip((*_NAMES, "grad_mask"), tensors[:4], strict=True):
        if name in filled and like is not None:
            dtype = filled[_NAMES[0]].dtype if name in _NAMES else None
            check_tensor(filled[name], tuple(like.shape), name, home, dtype, for_writing=True)
    every = {"query": query, "key": key, "value": value, "attn_mask": mask}
    check_no_overlap(filled, {**every, **read})
    grads = None if backward_inputs.grads is None else tuple(filled[name] for name in _NAMES)
    grad_mask = filled.get("grad_mask", backward_inputs.grad_mask)
    return backward_inputs._replace(**read, grads=grads, grad_mask=grad_mask)


# --- Placements -----------------------------------------------------------------------------------


def forward_place(tensors: Tensors, request: Request) -> Placement:
    """The placement of a forward."""
    query, key, value = tensors[:3]
    device = request.options.device
    return Placement(
        query.device == device,
        request.out is not None,
        request.out_dtype,
        are_kernel_readable(query, key, value),
        lse_given=request.lse is not None,
        flattenable=have_flattened_views(query, key, value),
    )


def backward_place(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> Placement:
    """The placement of a backward."""
    shape, device = request.shape, request.options.device
    query, key, value = tensors[:3]
    grad_out, out, lse, grads = backward_inputs[:4]
    divided = rescaled_upstream_bytes(grad_out.dtype, shape, on_device=grad_out.device == device)
    return Placement(
        query.device == grad_out.device == out.device == device,
        grads is not None,
        shape.dtype if grads is None else grads[0].dtype,
        are_kernel_readable(query, key, value),
        # The gradient is counted as copied even where it is not: ``estimate`` counts it so.
        (divided is None) + (not is_kernel_readable(out, shape.dtype)),
        divided,
        same_dtype=grad_out.dtype == out.dtype == shape.dtype,
        lse_here=lse.device == device,
        flattenable=have_flattened_views(query, key, value, grad_out, out),
    )


def place_after(place: Placement, request: Request) -> Placement:
    """The placement of the backward after a forward in ``place``. The gradient is counted as
    copied: autograd may hand over an expanded one."""
    shape, out, result = request.shape, request.out, request.out_dtype
    copied = result != shape.dtype or (out is not None and not is_kernel_readable(out, shape.dtype))
    divided = rescaled_upstream_bytes(result, shape, on_device=place.resident)
    return replace(
        place, results_given=False, result_dtype=shape.dtype, lse_given=False,
        rescaled_grad_bytes=divided,
        n_unreadable=(divided is None) + copied,
    )  # fmt: skip
