"""The gradient of a call's additive mask, tile by tile, before the other gradients."""

from __future__ import annotations

import torch

from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.request import Request
from quorum_attention.call.validation import Tensors
from quorum_attention.execution.device.allocate import empty
from quorum_attention.execution.mask_gradient import add_up_mask_gradient
from quorum_attention.execution.problem import Problem
from quorum_attention.kernels.operator_call import Saved
from quorum_attention.kernels.protocol import check_mask_gradient
from quorum_attention.passes.jobs import computing_on, job_of


def mask_grad_bytes(tensors: Tensors, request: Request) -> int:
    """Return the bytes of the mask's gradient that the budget counts."""
    bias = tensors.bias
    if bias is None or bias.device != request.options.device:
        return 0
    return bias.nbytes


def allocate_mask_grad(
    tensors: Tensors, backward_inputs: BackwardInputs
) -> tuple[torch.Tensor, ...]:
    """Return the tensor of the mask's gradient in a tuple: the caller's, or a new one
    where the mask is. The tuple is empty if that gradient is not wanted."""
    bias = tensors.bias
    if backward_inputs.grad_mask is False or bias is None:
        return ()
    if isinstance(backward_inputs.grad_mask, torch.Tensor):
        return (backward_inputs.grad_mask,)
    return (empty(tuple(bias.shape), bias.dtype, bias.device, "the mask's gradient"),)


def compute_mask_grad(
    tensors: Tensors,
    request: Request,
    backward_inputs: BackwardInputs,
    problem: Problem,
) -> tuple[torch.Tensor, ...]:
    """Compute the gradient of the mask, if it is wanted.

    The other gradients come later: they are results, which would take memory from its
    tiles.
    """
    if backward_inputs.grad_mask is False:
        return ()
    check_mask_gradient(problem.kernel)
    with computing_on(request.options.device):
        grads = allocate_mask_grad(tensors, backward_inputs)
        if backward_inputs.grad_mask is not True:
            torch.autograd.graph.increment_version(grads)
        upstream = Saved(
            backward_inputs.grad_out, backward_inputs.out, backward_inputs.lse
        )
        job = job_of(tensors, request, problem)
        recoveries = add_up_mask_gradient(
            job, upstream, grads[0], request.options.available_bytes
        )
        if request.report is not None:
            line = f"computed tile by tile, beside kernel {problem.kernel.name}"
            request.report.mask_gradient = [line, *recoveries]
        return grads
