"""Where the tensors of a forward and of a backward are, as far as a plan depends on
it."""

from __future__ import annotations

from dataclasses import replace

from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.request import Request
from quorum_attention.call.validation import Tensors
from quorum_attention.execution.kernel_layout import (
    have_flattened_views,
    is_kernel_readable,
    unreadable_inputs,
)
from quorum_attention.execution.problem import Placement
from quorum_attention.execution.upstream import rescaled_upstream_bytes


def forward_place(tensors: Tensors, request: Request) -> Placement:
    """Return the placement of a forward."""
    inputs = tensors[:3]
    return Placement(
        resident=tensors.query.device == request.options.device,
        results_given=request.out is not None,
        result_dtype=request.out_dtype,
        unreadable_inputs=unreadable_inputs(*inputs),
        lse_given=request.lse is not None,
        flattenable=have_flattened_views(*inputs),
    )


def backward_place(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> Placement:
    """Return the placement of a backward."""
    device = request.options.device
    dtype = request.shape.dtype
    inputs = tensors[:3]
    grad_out = backward_inputs.grad_out
    out = backward_inputs.out
    grads = backward_inputs.grads
    rescaled_bytes = rescaled_upstream_bytes(
        grad_out.dtype, request.shape, on_device=grad_out.device == device
    )
    return Placement(
        resident=tensors.query.device == grad_out.device == out.device == device,
        results_given=grads is not None,
        result_dtype=dtype if grads is None else grads[0].dtype,
        unreadable_inputs=unreadable_inputs(*inputs),
        n_unreadable=_count_unreadable(rescaled_bytes, is_kernel_readable(out, dtype)),
        rescaled_grad_bytes=rescaled_bytes,
        same_dtype=grad_out.dtype == out.dtype == dtype,
        lse_here=backward_inputs.lse.device == device,
        flattenable=have_flattened_views(*inputs, grad_out, out),
    )


def place_after(place: Placement, request: Request) -> Placement:
    """Return the placement of the backward that follows a forward in ``place``."""
    dtype = request.shape.dtype
    is_out_readable = request.out_dtype == dtype
    if request.out is not None and not is_kernel_readable(request.out, dtype):
        is_out_readable = False
    rescaled_bytes = rescaled_upstream_bytes(
        request.out_dtype, request.shape, on_device=place.resident
    )
    return replace(
        place,
        results_given=False,
        result_dtype=dtype,
        lse_given=False,
        rescaled_grad_bytes=rescaled_bytes,
        n_unreadable=_count_unreadable(rescaled_bytes, is_out_readable),
    )


def _count_unreadable(rescaled_bytes: int | None, is_out_readable: bool) -> int:
    """Count which of upstream gradient and output operators cannot read.

    An upstream gradient that is not rescaled counts even where operators could read it:
    autograd may hand over an expanded one, and ``estimate`` counts the same.
    """
    n_unreadable = 1 if rescaled_bytes is None else 0
    return n_unreadable if is_out_readable else n_unreadable + 1
