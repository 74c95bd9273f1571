"""The ``Placement`` of a pass: where its tensors are, and what is copied, for the planner."""

from __future__ import annotations

from dataclasses import replace

from quorum_attention.call.gradients import Given
from quorum_attention.call.request import Request, Tensors
from quorum_attention.execution.call import divided_bytes, is_operand, lie_well
from quorum_attention.execution.case import Placement


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
    grad_out, out, _, grads = given[:4]
    divided = divided_bytes(grad_out.dtype, work, here=grad_out.device == device)
    return Placement(
        device.type,
        query.device == device,
        grads is not None,
        work.dtype if grads is None else grads[0].dtype,
        lie_well(query, key, value),
        # The gradient is counted as copied even where it is not: ``estimate`` counts it so.
        (divided is None) + (not is_operand(out, work.dtype)),
        divided,
    )


def place_after(place: Placement, request: Request) -> Placement:
    """The placement of the backward after a forward in ``place``. The gradient is counted as
    copied: autograd may hand over an expanded one."""
    work, out, result = request.work, request.out, request.out_dtype
    copied = result != work.dtype or (out is not None and not is_operand(out, work.dtype))
    divided = divided_bytes(result, work, here=place.resident)
    copies = (divided is None) + copied
    return replace(
        place,
        results_given=False,
        result_dtype=work.dtype,
        copied=copies,
        divided=divided,
        lse_given=False,
    )
