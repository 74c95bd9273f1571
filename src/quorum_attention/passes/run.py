"""Runs the forward or the backward of a checked call."""

from __future__ import annotations

from dataclasses import replace

import torch

from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.lse_columns import (
    column_bytes,
    with_columns,
    without_columns,
)
from quorum_attention.call.request import Request
from quorum_attention.call.validation import Tensors
from quorum_attention.kernels.operator_call import OutLse
from quorum_attention.kernels.protocol import check_mask_gradient
from quorum_attention.kernels.result_layout import empty_like_input
from quorum_attention.kernels.sinks import sinks_gradient
from quorum_attention.kernels.torch_private import restores_grad_and_autocast
from quorum_attention.passes.decisions import MASK_GRAD, decide_backward, decide_forward
from quorum_attention.passes.mask_grad import (
    allocate_mask_grad,
    compute_mask_grad,
    mask_grad_bytes,
)
from quorum_attention.passes.one_call import run_cached_call
from quorum_attention.passes.run_decision import run_decision, run_with_mask_grad

_CASTS = "casts of the inputs"
_GRADS = ("grad_query", "grad_key", "grad_value")


def run_forward(tensors: Tensors, request: Request) -> OutLse:
    """Compute (out, lse) of a call; ``out`` is the request's, if it has one.

    Raises:
        BudgetError, NotImplementedError: before any work, as of ``decide_forward``.
    """
    results = run_cached_call(tensors, request)
    if results is not None:
        out, lse = results
        return out, lse
    return _run_uncached_forward(tensors, request)


@restores_grad_and_autocast
def _run_uncached_forward(tensors: Tensors, request: Request) -> OutLse:
    """Compute (out, lse) as ``run_forward`` does, by a plan if one is needed."""
    request = _with_number_of_keys(tensors, request)
    request = request.reserving(request.cast_bytes, _CASTS)
    if _has_no_pairs(tensors):
        return _forward_without_pairs(tensors, request)
    if request.runner is not None:
        return request.runner.forward(tensors, request)
    decision = decide_forward(tensors, request)
    if request.mask_grad:
        check_mask_gradient(decision.problem.kernel)
    preallocated = {}
    if request.out is not None:
        preallocated["out"] = request.out
    if request.lse is not None:
        preallocated["lse"] = request.lse
    out, lse = run_decision(tensors, request, decision, preallocated)
    return out, lse


def _with_number_of_keys(tensors: Tensors, request: Request) -> Request:
    """Return a request with the number of keys of this call: calls that share a request
    may differ in it (``dispatch``)."""
    if request.decisions is None:
        return request
    shape = replace(request.shape, n_keys=tensors.key.shape[-2])
    return replace(request, shape=shape)


def _has_no_pairs(tensors: Tensors) -> bool:
    """Tell whether there are no queries or no keys: results are then empty or zeros."""
    return 0 in (tensors.query.numel(), tensors.value.numel())


def _forward_without_pairs(tensors: Tensors, request: Request) -> OutLse:
    """Return (out, lse) of a call without queries or without keys."""
    query = tensors.query
    rows = tuple(query.shape[:-1])
    out = request.out
    if out is None:
        out = empty_like_input(
            query, (*rows, request.shape.value_dim), request.out_dtype
        )
    lse = request.lse
    if lse is None:
        lse = torch.empty(rows, dtype=request.shape.state_dtype, device=query.device)
    lse.fill_(float("-inf"))
    if tensors.sinks is not None:
        lse.copy_(tensors.sinks.detach()[:, None])
    return out.zero_(), lse


def run_backward(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of query, key and value, then those of mask and sinks if
    wanted.

    Preallocated gradients are filled.

    Raises:
        BudgetError, NotImplementedError: before any work, as of ``decide_backward``.
    """
    if backward_inputs.grad_lse is None:
        results = run_cached_call(tensors, request, backward_inputs)
        if results is not None:
            return results
    return _run_uncached_backward(tensors, request, backward_inputs)


@restores_grad_and_autocast
def _run_uncached_backward(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients as ``run_backward`` does, by a plan if one is needed."""
    request = _with_number_of_keys(tensors, request)
    request = _reserving_for_backward(tensors, request, backward_inputs)
    grads = _compute_gradients(tensors, request, backward_inputs)
    if not backward_inputs.grad_sinks:
        return grads
    assert tensors.sinks is not None
    with torch.no_grad():
        grad_sinks = sinks_gradient(
            backward_inputs.grad_out,
            backward_inputs.out,
            backward_inputs.lse,
            tensors.sinks,
            backward_inputs.grad_lse,
        )
    return (*grads, grad_sinks)


def _reserving_for_backward(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> Request:
    """Reserve what a backward holds beside its passes: casts, the mask's gradient,
    wider inputs."""
    request = request.reserving(request.cast_bytes, _CASTS)
    if backward_inputs.grad_mask is True:
        request = request.reserving(mask_grad_bytes(tensors, request), MASK_GRAD)
    if backward_inputs.grad_lse is not None:
        columns = column_bytes(tensors, request, backward_inputs)
        request = request.reserving(columns, "the gradient of the log-sum-exp")
    return request


def _compute_gradients(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of query, key, value and mask."""
    if _has_no_pairs(tensors):
        grads = backward_inputs.grads or tuple(torch.empty_like(t) for t in tensors[:3])
        grad_mask = allocate_mask_grad(tensors, backward_inputs)
        return tuple(grad.zero_() for grad in (*grads, *grad_mask))
    if request.runner is not None:
        without_sinks = backward_inputs._replace(grad_sinks=False)
        return request.runner.backward(tensors, request, without_sinks)
    if backward_inputs.grad_lse is None:
        return _run_gradients(tensors, request, backward_inputs)
    # The wider inputs are freed before results are cut to their widths.
    grads = _run_gradients(*with_columns(tensors, request, backward_inputs))
    return (
        *without_columns(grads[:3], request.shape, backward_inputs.grads),
        *grads[3:],
    )


def _run_gradients(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of query, key, value and mask, on one device of this
    process."""
    if request.shape.columns:
        results = run_cached_call(tensors, request, backward_inputs)
        if results is not None:
            return results
    decision = decide_backward(tensors, request, backward_inputs)
    results = run_with_mask_grad(tensors, request, decision, backward_inputs)
    if results is not None:
        return results
    grad_mask = compute_mask_grad(tensors, request, backward_inputs, decision.problem)
    preallocated = dict(zip(_GRADS, backward_inputs.grads or (), strict=False))
    without_mask = backward_inputs._replace(grad_mask=False)
    grads = run_decision(tensors, request, decision, preallocated, without_mask)
    return (*grads, *grad_mask)
