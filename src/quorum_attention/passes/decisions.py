"""Decides kernel and schedule of the passes of a request."""

from __future__ import annotations

from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.placement import backward_place, forward_place, place_after
from quorum_attention.call.request import Request
from quorum_attention.call.validation import Tensors
from quorum_attention.passes.mask_grad import mask_grad_bytes
from quorum_attention.planner.decide import Decision, both_passes, decide

MASK_GRAD = "the mask's gradient"


def decide_forward(tensors: Tensors, request: Request) -> Decision:
    """Choose kernel and schedule of a forward. The call has at least one query and one
    key.

    With a budget and gradients to follow, the backward has to fit the same budget; it
    is decided again when its turn comes.

    Raises:
        BudgetError: the budget is too small for one of the passes.
        NotImplementedError: no kernel can run the call.
    """
    place = forward_place(tensors, request)

    def decide_pass(backward: bool) -> Decision:
        options = request.options
        if backward and request.mask_grad:
            options = options.reserving(mask_grad_bytes(tensors, request), MASK_GRAD)
        return decide(
            request.shape,
            place_after(place, request) if backward else place,
            options,
            request.out_dtype,
            backward=backward,
            needs_grad=request.records,
        )

    if request.options.budget_bytes is None or not request.records:
        return decide_pass(backward=False)
    forward, _ = both_passes(decide_pass)
    return forward


def decide_backward(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> Decision:
    """Choose kernel and schedule of a backward. The call has at least one query and one
    key.

    Raises:
        BudgetError: the budget is too small.
        NotImplementedError: no kernel can run the call.
    """
    place = backward_place(tensors, request, backward_inputs)
    out_dtype = backward_inputs.out.dtype
    return decide(request.shape, place, request.options, out_dtype, backward=True)
