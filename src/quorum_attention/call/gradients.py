"""What a backward is given beside a forward's arguments, checked; where a pass has its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from quorum_attention.call.request import Request, Tensors
from quorum_attention.call.transforms import refuse_transforms
from quorum_attention.call.validation import as_tensor, check_apart, check_given, check_result
from quorum_attention.counts import shown
from quorum_attention.execution.call import Three, divided_bytes, is_operand, lie_well
from quorum_attention.execution.problem import Placement

_NAMES = ("grads[0]", "grads[1]", "grads[2]")


class Given(NamedTuple):
    """What a backward is given beside the inputs.

    Attributes:
        grad_out, out: the upstream gradient and the output, (*batch, heads, n_queries, value_dim).
        lse: (*batch, heads, n_queries), natural log.
        grads: preallocated results, like query, key and value.
        of_mask: whether the gradient of the mask is wanted too.
        grad_mask: a preallocated tensor for it, like the mask.
        of_sinks: whether the gradient of the sinks is wanted too.
        grad_lse: the gradient of the log-sum-exp, like ``lse``; None is 0.
        partial: whether output and log-sum-exp are of more keys than the call's.
    """

    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grads: Three | None = None
    of_mask: bool = False
    grad_mask: torch.Tensor | None = None
    of_sinks: bool = False
    grad_lse: torch.Tensor | None = None
    partial: bool = False


def given_of(
    tensors: Tensors,
    request: Request,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grads: Sequence[torch.Tensor] | None,
    grad_mask: torch.Tensor | bool,
    grad_lse: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
) -> Given:
    """The arguments checked against the call, with a dimension of heads.

    Args:
        inputs: query, key and value as they were given, before they were broadcast.

    Raises:
        ValueError, TypeError, NotImplementedError: one does not fit, by name.
    """
    grad_out, out = as_tensor(grad_out, "grad_out"), as_tensor(out, "out")
    lse = as_tensor(lse, "lse")
    query, key, value = tensors[:3]
    refuse_transforms(grad_out, query, key, value)
    grad_out, out = request.with_heads(grad_out, 2), request.with_heads(out, 2)
    lse = request.with_heads(lse, 1)
    rows, home = tuple(query.shape[:-1]), query.device
    check_given(grad_out, (*rows, value.shape[-1]), "grad_out", home)
    check_given(out, (*rows, value.shape[-1]), "out", home)
    check_given(lse, rows, "lse", home, request.work.state_dtype)
    given = Given(grad_out, out, lse)
    if grad_lse is not None:
        grad_lse = request.with_heads(as_tensor(grad_lse, "grad_lse"), 1)
        check_given(grad_lse, rows, "grad_lse", home)
        given = given._replace(grad_lse=grad_lse)
    if grads is not None:
        given = given._replace(grads=_targets(tensors, given, grads, inputs))
    return given if grad_mask is False else _with_mask(tensors, given, grad_mask)


def _with_mask(tensors: Tensors, given: Given, grad_mask: torch.Tensor | bool) -> Given:
    """``given`` with the wish for the mask's gradient, checked."""
    mask = tensors.mask
    if mask is None or mask.dtype == torch.bool:
        what = "None" if mask is None else "a boolean mask"
        raise ValueError(f"grad_mask needs an additive attn_mask, got {what}")
    if grad_mask is True:
        return given._replace(of_mask=True)
    target = as_tensor(grad_mask, "grad_mask", written=True)
    check_result(target, tuple(mask.shape), "grad_mask", tensors.query.device)
    results = dict(zip(_NAMES, given.grads or (), strict=False))
    check_apart({"grad_mask": target}, {**_read(tensors, given), **results})
    return given._replace(of_mask=True, grad_mask=target)


def _read(tensors: Tensors, given: Given) -> dict[str, torch.Tensor | None]:
    """What a backward reads, by the names of its arguments."""
    query, key, value, mask, _ = tensors
    return {
        "query": query, "key": key, "value": value, "attn_mask": mask, "out": given.out,
        "grad_out": given.grad_out, "lse": given.lse, "grad_lse": given.grad_lse,
    }  # fmt: skip


def _targets(
    tensors: Tensors,
    given: Given,
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> Three:
    """``grads`` as tensors, checked: they may be written and share no memory."""
    if not isinstance(grads, (tuple, list)):
        raise TypeError(f"grads must be three tensors, got {shown(grads)}")
    if len(grads) != 3:
        raise ValueError(f"grads must be three tensors, got {len(grads)}")
    if any(i.shape != o.shape for i, o in zip(tensors[:3], inputs, strict=True)):
        raise NotImplementedError(
            "grads cannot be given for inputs that are broadcast, nor without a dimension of "
            "heads: leave them out, and their gradients are returned"
        )
    first, second, third = (
        as_tensor(grad, name, written=True) for grad, name in zip(grads, _NAMES, strict=True)
    )
    for target, name, like in zip((first, second, third), _NAMES, tensors[:3], strict=True):
        check_result(target, tuple(like.shape), name, tensors.query.device, first.dtype)
    read = _read(tensors, given)
    check_apart(dict(zip(_NAMES, (first, second, third), strict=True)), read)
    return first, second, third


# --- Placements -----------------------------------------------------------------------------------


def forward_place(tensors: Tensors, request: Request) -> Placement:
    """The placement of a forward."""
    query, key, value = tensors[:3]
    device = request.options.device
    return Placement(
        device.type,
        query.device == device,
        request.out is not None,
        request.out_dtype,
        lie_well(query, key, value),
        lse_given=request.lse is not None,
    )


def backward_place(tensors: Tensors, request: Request, given: Given) -> Placement:
    """The placement of a backward."""
    work, device = request.work, request.options.device
    query, key, value = tensors[:3]
    grad_out, out, lse, grads = given[:4]
    divided = divided_bytes(grad_out.dtype, work, here=grad_out.device == device)
    return Placement(
        device.type,
        query.device == grad_out.device == out.device == device,
        grads is not None,
        work.dtype if grads is None else grads[0].dtype,
        lie_well(query, key, value),
        # The gradient is counted as copied even where it is not: ``estimate`` counts it so.
        (divided is None) + (not is_operand(out, work.dtype)),
        divided,
        same_dtype=grad_out.dtype == out.dtype == work.dtype,
        lse_here=lse.device == device,
    )


def place_after(place: Placement, request: Request) -> Placement:
    """The placement of the backward after a forward in ``place``. The gradient is counted as
    copied: autograd may hand over an expanded one."""
    work, out, result = request.work, request.out, request.out_dtype
    copied = result != work.dtype or (out is not None and not is_operand(out, work.dtype))
    divided = divided_bytes(result, work, here=place.resident)
    return replace(
        place, results_given=False, result_dtype=work.dtype, lse_given=False, divided=divided,
        copied=(divided is None) + copied,
    )  # fmt: skip
