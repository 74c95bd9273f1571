"""Passes that are one kernel call: run without a plan, and cached with the request.

A request that serves later calls too (``dispatch``) caches which of its passes are one
kernel call. Such a pass is run again without being decided again: deciding takes longer
than short calls do.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.request import Request
from quorum_attention.call.validation import Tensors
from quorum_attention.errors import is_out_of_memory
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.routes.whole import (
    Whole,
    saved_of,
    single_call_with_bias_gradient,
    single_kernel_call,
    usable_gradients,
)
from quorum_attention.kernels.operator_call import Call
from quorum_attention.kernels.registry import registrations
from quorum_attention.kernels.torch_private import (
    is_without_grad_and_autocast,
    no_grad_no_autocast,
    restores_grad_and_autocast,
)
from quorum_attention.passes.jobs import detach_view, job_of
from quorum_attention.passes.mask_grad import allocate_mask_grad
from quorum_attention.planner.decide import Decision

# Most bytes of a mask's gradient before it is summed.
_MOST_BYTES = 1 << 30

_Results = tuple[torch.Tensor, ...] | None


def run_cached_call(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs | None = None
) -> tuple[torch.Tensor, ...] | None:
    """Run a pass that was one kernel call before.

    Returns:
        The results; None if the pass is not cached, or has to be planned now.
    """
    if not request.decisions:
        return None
    key = _pass_key(tensors, request, backward_inputs)
    problem = request.decisions.get(key)
    if problem is None:
        return None
    results = run_single_kernel_call(
        tensors,
        request,
        problem,
        {},
        backward_inputs,
    )
    if results is None:
        # Later calls are planned from the start: they would likely fail in the same
        # way, after all of their work.
        request.decisions[key] = None
        return None
    return tuple(map(detach_view, results))


def cache_call(
    tensors: Tensors,
    request: Request,
    backward_inputs: BackwardInputs | None,
    decision: Decision,
) -> None:
    """Cache a decision for one kernel call, if the request serves later calls too and
    none of them had to be planned."""
    if request.decisions is not None and is_single_kernel_call(decision, request):
        key = _pass_key(tensors, request, backward_inputs)
        request.decisions.setdefault(key, decision.problem)


def run_single_kernel_call(
    tensors: Tensors,
    request: Request,
    problem: Problem,
    results: Mapping[str, torch.Tensor],
    backward_inputs: BackwardInputs | None,
) -> tuple[torch.Tensor, ...] | None:
    """Run a pass as one kernel call.

    Args:
        results: the preallocated results, by the names of their states.
        backward_inputs: None for a forward. If it wants the gradient of the mask, the
            kernel computes that gradient (``gives_mask_grad``).

    Returns:
        The results, the gradient of the mask after the others; None if the pass has to
        be planned, because memory ran out, or gradients in 16 bits are not finite.
    """
    backend = problem.backend
    try:
        # To enter contexts that do nothing takes short calls of a CPU microseconds.
        if is_without_grad_and_autocast() and not backend.own_memory:
            return _compute(
                tensors,
                request,
                problem,
                results,
                backward_inputs,
            )
        return _compute_in_contexts(
            tensors,
            request,
            problem,
            results,
            backward_inputs,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    backend.give_back_cached()
    return None


@restores_grad_and_autocast
def _compute_in_contexts(
    tensors: Tensors,
    request: Request,
    problem: Problem,
    results: Mapping[str, torch.Tensor],
    backward_inputs: BackwardInputs | None,
) -> _Results:
    """Compute the results on the device of the pass, without gradients and autocast."""
    current = problem.backend.current(request.options.device)
    with current, no_grad_no_autocast():
        return _compute(
            tensors,
            request,
            problem,
            results,
            backward_inputs,
        )


def _compute(
    tensors: Tensors,
    request: Request,
    problem: Problem,
    results: Mapping[str, torch.Tensor],
    backward_inputs: BackwardInputs | None,
) -> _Results:
    """Compute the results of a pass that is one kernel call."""
    if not results and _is_plain(request, problem, backward_inputs):
        return _compute_plain(tensors, request, problem, backward_inputs)
    job = job_of(tensors, request, problem, results, backward_inputs)
    if backward_inputs is None or backward_inputs.grad_mask is False:
        return single_kernel_call(job)
    (grad_mask,) = allocate_mask_grad(tensors, backward_inputs)
    return (*single_call_with_bias_gradient(job, grad_mask), grad_mask)


def _is_plain(
    request: Request, problem: Problem, backward_inputs: BackwardInputs | None
) -> bool:
    """Tell whether a kernel call needs no job: its tensors are read as they are, and
    its results are those of the pass."""
    shape = problem.shape
    if shape.bias is not None or shape.sinks or request.dropout is not None:
        return False
    if len(shape.batch_shape) != 1 or problem.place.result_dtype != shape.dtype:
        return False
    if problem.place.unreadable_inputs:
        return False
    if backward_inputs is None:
        return True
    return problem.place.rescaled_grad_bytes is None


def _compute_plain(
    tensors: Tensors,
    request: Request,
    problem: Problem,
    backward_inputs: BackwardInputs | None,
) -> _Results:
    """Compute the results of a pass that is one kernel call and needs no job."""
    query, key, value = tensors[:3]
    call = Call(query, key, value, request.shape.is_causal, request.scale)
    if backward_inputs is None:
        out, lse = problem.kernel.whole_forward(call)
        return _rounded(out, query.dtype), lse
    saved = saved_of(
        problem,
        request.options.device,
        backward_inputs.grad_out,
        backward_inputs.out,
        backward_inputs.lse,
    )
    gradients = problem.kernel.whole_backward(call, saved)
    usable = usable_gradients(gradients, problem, request.options.device)
    if usable is None:
        return None
    return tuple([_rounded(gradient, query.dtype) for gradient in usable])


def _rounded(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a kernel's result in ``dtype``."""
    return part if part.dtype == dtype else part.to(dtype)


def _pass_key(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs | None
) -> Hashable:
    """Return the key of a pass: everything that differs between passes of one
    request.

    A backward may get its inputs in another layout than the forward had: from a hook on
    saved tensors, or if their ``.data`` was replaced.
    """
    if backward_inputs is None:
        return None
    inputs = (tensors.query, tensors.key, tensors.value)
    word_bytes = backend_of(tensors.query.device).word_bytes
    deterministic = torch._C._get_deterministic_algorithms()
    wants_mask_grad = backward_inputs.grad_mask is not False
    return (
        *[strides_key(tensor) for tensor in inputs],
        *[tensor.data_ptr() % word_bytes for tensor in inputs],
        request.shape.columns,
        wants_mask_grad,
        deterministic,
        registrations(request.options.device),
        torch.get_num_threads(),
    )


def strides_key(tensor: torch.Tensor) -> Hashable:
    """Return the strides of a tensor (batch, heads, rows, dim), as far as they say how
    its rows lie; True: it is contiguous."""
    if tensor.is_contiguous():
        return True
    # A batch of one has a stride that means nothing, and grows where rows lie before
    # heads.
    return tensor.stride()[1:] if tensor.shape[0] == 1 else tensor.stride()


def gives_mask_grad(
    decision: Decision, request: Request, backward_inputs: BackwardInputs
) -> bool:
    """Tell whether a backward is one kernel call that also computes the gradient of the
    mask.

    A call with a budget, or with a report of its own, has that gradient tile by tile,
    as planned.
    """
    options = request.options
    if options.available_bytes is not None or options.watched:
        return False
    if backward_inputs.grad_mask is not True or backward_inputs.grads is not None:
        return False
    problem = decision.problem
    if not is_single_kernel_call(decision, request) or not problem.place.in_place:
        return False
    shape = request.shape
    if len(shape.batch_shape) != 1 or shape.columns or shape.dropout or problem.scaled:
        return False
    n_pairs = shape.lanes * shape.n_queries * shape.n_keys
    if n_pairs * shape.dtype.itemsize > _MOST_BYTES:
        return False
    return problem.kernel.gives_bias_gradient(problem.kernel_shape)


def is_single_kernel_call(decision: Decision, request: Request) -> bool:
    """Tell whether a decision is for one kernel call, on a device with memory of its
    own if it has a plan."""
    if decision.plan is None:
        return True
    problem = decision.problem
    if len(request.shape.batch_shape) != 1 or not problem.place.same_dtype:
        return False
    schedule = decision.plan.schedule
    is_uncut = isinstance(schedule.route, Whole) and schedule.is_all(request.shape)
    return is_uncut and problem.backend.own_memory
