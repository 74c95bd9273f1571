"""What a backward reads and fills beside a forward's arguments, and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quorum_attention.argument_checks import shown, switch
from quorum_attention.call.request import Request, tensors_by_name
from quorum_attention.call.transformations import refuse_transforms
from quorum_attention.call.validation import (
    Tensors,
    as_tensor,
    check_no_overlap,
    check_tensor,
)
from quorum_attention.kernels.operator_call import Three
from quorum_attention.kernels.tensors import NamedTensors

_GRADS = ("grads[0]", "grads[1]", "grads[2]")


class BackwardInputs(NamedTuple):
    """Tensors that a backward reads and fills beside the inputs.

    Attributes:
        grad_out, out: the upstream gradient and the output, (*batch, heads, n_queries,
            value_dim).
        lse: (*batch, heads, n_queries), natural log.
        grads: preallocated results, like query, key and value.
        grad_mask: whether the gradient of the mask is wanted too, or a preallocated
            tensor for it.
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


def check_backward_inputs(
    tensors: Tensors,
    request: Request,
    backward_inputs: BackwardInputs,
    originals: Sequence[torch.Tensor],
) -> BackwardInputs:
    """Check what a backward reads and fills against the call, and give it a dimension
    of heads.

    Args:
        backward_inputs: as its caller wrote it.
        originals: query, key and value as they were given, before they were broadcast.

    Raises:
        ValueError, TypeError, NotImplementedError: one does not fit, by name.
    """
    upstream = _checked_upstream(tensors, request, backward_inputs)
    results = _preallocated(tensors, backward_inputs, originals)
    if switch(backward_inputs.grad_sinks, "grad_sinks") and tensors.sinks is None:
        raise ValueError("grad_sinks needs a Mask with sinks as attn_mask")
    checked = backward_inputs._replace(**upstream)  # type: ignore[arg-type]
    if not results:
        return checked
    results = _checked_results(tensors, results)
    inputs = tensors_by_name(tensors, request.options.kernel)
    check_no_overlap(results, {**inputs, **upstream})
    if backward_inputs.grads is not None:
        grad_query, grad_key, grad_value = (results[name] for name in _GRADS)
        checked = checked._replace(grads=(grad_query, grad_key, grad_value))
    if "grad_mask" in results:
        checked = checked._replace(grad_mask=results["grad_mask"])
    return checked


def _checked_upstream(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> NamedTensors:
    """Return the tensors that a backward reads beside the inputs, checked, by name."""
    query = tensors.query
    lse_shape = tuple(query.shape[:-1])
    out_shape = (*lse_shape, tensors.value.shape[-1])
    shapes = {
        "grad_out": out_shape,
        "out": out_shape,
        "lse": lse_shape,
        "grad_lse": lse_shape,
    }
    upstream: NamedTensors = {}
    for name in shapes:
        tensor = getattr(backward_inputs, name)
        if tensor is not None:
            upstream[name] = as_tensor(tensor, name)
    refuse_transforms(*tensors, *upstream.values())
    for name, tensor in upstream.items():
        shape = shapes[name]
        upstream[name] = request.add_heads(tensor, len(shape) - 1)
        dtype = request.shape.state_dtype if name == "lse" else None
        check_tensor(
            upstream[name],
            shape,
            name,
            query.device,
            dtype,
        )
    return upstream


def _preallocated(
    tensors: Tensors, backward_inputs: BackwardInputs, originals: Sequence[torch.Tensor]
) -> NamedTensors:
    """Return the gradients that the caller preallocated, unchecked, by name."""
    results: NamedTensors = {}
    grads = backward_inputs.grads
    if grads is not None:
        if not isinstance(grads, (tuple, list)) or len(grads) != 3:
            raise TypeError(f"grads must be three tensors, got {shown(grads)}")
        if any(t.shape != o.shape for t, o in zip(tensors[:3], originals, strict=True)):
            raise NotImplementedError(
                "grads cannot be given for inputs that are broadcast, nor without a "
                "dimension of heads: leave them out, and their gradients are returned"
            )
        results.update(zip(_GRADS, grads, strict=True))
    grad_mask = backward_inputs.grad_mask
    if grad_mask is False:
        return results
    bias = tensors.bias
    if bias is None or bias.dtype == torch.bool:
        got = "None" if bias is None else "a boolean mask"
        raise ValueError(f"grad_mask needs an additive attn_mask, got {got}")
    if grad_mask is not True:
        results["grad_mask"] = grad_mask
    return results


def _checked_results(tensors: Tensors, results: NamedTensors) -> NamedTensors:
    """Return preallocated gradients as tensors that can be written to, checked, by
    name."""
    results = {
        name: as_tensor(result, name, for_writing=True)
        for name, result in results.items()
    }
    home = tensors.query.device
    for name, like in zip((*_GRADS, "grad_mask"), tensors[:4], strict=True):
        if name not in results or like is None:
            continue
        # Three gradients have one dtype; the mask's may have any.
        dtype = results[_GRADS[0]].dtype if name in _GRADS else None
        check_tensor(
            results[name], tuple(like.shape), name, home, dtype, for_writing=True
        )
    return results
