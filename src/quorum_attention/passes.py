"""One pass of a call, forward or backward: decided, run, reported."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.call.block import BlockResults, CallBlock, Masked, WholeCall, request_of_block
from quorum_attention.call.gradients import (
    BackwardInputs,
    backward_place,
    forward_place,
    place_after,
)  # fmt: skip
from quorum_attention.call.lse_columns import column_bytes, with_columns, without_columns
from quorum_attention.call.options import CallOptions
from quorum_attention.call.request import Request
from quorum_attention.call.validation import Tensors
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.errors import BudgetError, is_out_of_memory, our_out_of_memory
from quorum_attention.execution.bias import BiasView
from quorum_attention.execution.device.allocate import empty
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.job import PassJob, Progress
from quorum_attention.execution.mask_gradient import add_up_mask_gradient
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.routes.whole import Whole, single_kernel_call
from quorum_attention.execution.run_pass import run_pass
from quorum_attention.execution.upstream import rescale_upstream
from quorum_attention.kernels.protocol import Saved, check_mask_gradient
from quorum_attention.kernels.registry import get_kernel, registrations
from quorum_attention.kernels.result_layout import empty_like_input
from quorum_attention.kernels.sinks import sinks_gradient
from quorum_attention.kernels.torch_private import numbers_only
from quorum_attention.planner.decide import Decision, both_passes, decide, with_plan
from quorum_attention.planner.plan import Plan, log_cut
from quorum_attention.units import format_bytes, format_least

_Result = TypeVar("_Result")
_CASTS = "casts of the inputs"
_NAMES = "query", "key", "value"
_GRADIENTS = "grad_query", "grad_key", "grad_value"
# Rows of a forward that are computed again, each of one of so many equal parts; of a call in many
# blocks one row of each, because each reads all keys of its block.
_CHECKED_ROWS = 4


def run_forward(tensors: Tensors, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), planned and run; ``out`` is the request's, if it has one."""
    if (made := _run_cached_call(tensors, request)) is not None:
        return made[0], made[1]
    return beside(request, request.cast_bytes, _CASTS, partial(_run_forward, tensors))


def _run_forward(tensors: Tensors, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    if request.decisions is not None:
        # Calls that share a request may differ in how many keys they have (``dispatch``).
        shape = replace(request.shape, n_keys=tensors.key.shape[-2])
        request = replace(request, shape=shape)
    shape, out, lse, query = request.shape, request.out, request.lse, tensors.query
    if _is_trivial(tensors):
        rows, device = tuple(query.shape[:-1]), query.device
        if out is None:
            out = empty_like_input(query, (*rows, shape.value_dim), request.out_dtype)
        if lse is None:
            lse = torch.empty(rows, dtype=shape.state_dtype, device=device)
        lse.fill_(float("-inf"))
        if tensors.sinks is not None:
            lse.copy_(tensors.sinks.detach()[:, None])
        return out.zero_(), lse
    if request.runner is not None:
        return request.runner.forward(tensors, request)
    decision = decide_forward(tensors, request)
    if request.mask_grad:
        check_mask_gradient(decision.problem.kernel)
    results = {name: t for name, t in (("out", out), ("lse", lse)) if t is not None}
    out, lse = _run(tensors, request, decision, results)
    return out, lse


def decide_forward(tensors: Tensors, request: Request) -> Decision:
    """How a forward would be run, of a call that is neither empty nor without keys.

    Raises:
        BudgetError, NotImplementedError: it cannot be.
    """
    shape, dtype, records = request.shape, request.out_dtype, request.records
    here, budget = forward_place(tensors, request), request.options.budget_bytes
    held = _mask_gradient_bytes(tensors, request) if request.mask_grad else 0

    def of(backward: bool) -> Decision:
        place = place_after(here, request) if backward else here

        def within(request: Request) -> Decision:
            how = request.options
            return decide(shape, place, how, dtype, backward=backward, needs_grad=records)

        return beside(request, held * backward, "the mask's gradient", within)

    # The backward, which has to fit the same budget, is decided again when its turn comes.
    return of(False) if budget is None or not records else both_passes(of)[0]


def run_backward(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value, and of the mask and the sinks if wanted, planned and
    run; those given are filled.
    """
    if (
        backward_inputs.grad_lse is None
        and (made := _run_cached_call(tensors, request, backward_inputs)) is not None
    ):
        return made
    held = request.cast_bytes
    if backward_inputs.grad_mask is True:
        held += _mask_gradient_bytes(tensors, request)
    if backward_inputs.grad_lse is not None:
        held += column_bytes(tensors, request, backward_inputs)
    what = f"{_CASTS}, and the gradients of mask and log-sum-exp"
    grads = beside(request, held, what, partial(_run_backward, tensors, backward_inputs))
    if not backward_inputs.grad_sinks:
        return grads
    assert tensors.sinks is not None
    with torch.no_grad():
        return (
            *grads,
            sinks_gradient(*backward_inputs[:3], tensors.sinks, backward_inputs.grad_lse),
        )


def _run_backward(
    tensors: Tensors, backward_inputs: BackwardInputs, request: Request
) -> tuple[torch.Tensor, ...]:
    if _is_trivial(tensors):
        made = backward_inputs.grads or tuple(torch.empty_like(t) for t in tensors[:3])
        return tuple(t.zero_() for t in (*made, *_mask_target(tensors, backward_inputs)))
    if request.runner is not None:
        return request.runner.backward(tensors, request, backward_inputs._replace(grad_sinks=False))
    if backward_inputs.grad_lse is None:
        return _run_gradients(tensors, request, backward_inputs)
    # The wider inputs are freed before results are made as wide as they should be.
    made = _run_gradients(*with_columns(tensors, request, backward_inputs))
    return (*without_columns(made[:3], request.shape, backward_inputs.grads), *made[3:])


def _run_gradients(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> tuple[torch.Tensor, ...]:
    if (
        request.shape.columns
        and (made := _run_cached_call(tensors, request, backward_inputs)) is not None
    ):
        return made
    decision = decide_backward(tensors, request, backward_inputs)
    of_mask = _mask_gradient(tensors, request, backward_inputs, decision.problem)
    results = dict(zip(_GRADIENTS, backward_inputs.grads or (), strict=False))
    return (*_run(tensors, request, decision, results, backward_inputs), *of_mask)


def decide_backward(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> Decision:
    """How a backward would be run, of a call that is neither empty nor without keys.

    Raises:
        BudgetError, NotImplementedError: it cannot be.
    """
    place = backward_place(tensors, request, backward_inputs)
    return decide(request.shape, place, request.options, backward_inputs.out.dtype, backward=True)


def _pass_key(request: Request, backward_inputs: BackwardInputs | None) -> Hashable:
    """All that differs between passes of calls that share a request."""
    if backward_inputs is None:
        return None
    deterministic = torch._C._get_deterministic_algorithms()
    return request.shape.columns, deterministic, registrations(), torch.get_num_threads()


def _cache_call(
    request: Request, backward_inputs: BackwardInputs | None, decision: Decision
) -> None:
    """Keep a decision for one kernel call, if the request serves later calls too (``dispatch``)."""
    if request.decisions is not None and _is_single_kernel_call(decision, request):
        request.decisions[_pass_key(request, backward_inputs)] = decision.problem


def _run_cached_call(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs | None = None
) -> tuple[torch.Tensor, ...] | None:
    """The results of a pass that was one kernel call before; None if it was not, or has to be
    planned now."""
    problem = (request.decisions or {}).get(_pass_key(request, backward_inputs))
    made = (
        None if problem is None else _run_one_call(tensors, request, problem, {}, backward_inputs)
    )
    return None if made is None else tuple(map(_detach_view, made))


def _is_single_kernel_call(decision: Decision, request: Request) -> bool:
    plan, problem = decision.plan, decision.problem
    if plan is None:
        return True
    # Scaled gradients are looked at afterwards, by what is planned for those that overflow.
    if len(request.shape.batch_shape) != 1 or problem.scaled or not problem.place.same_dtype:
        return False
    whole = isinstance(plan.schedule.route, Whole) and plan.schedule.is_all(request.shape)
    return whole and problem.backend.own_memory


def compute_block(
    call: WholeCall,
    block: CallBlock,
    inputs: Mapping[str, torch.Tensor],
    options: CallOptions,
    results: BlockResults | None = None,
    masked: Masked | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute a block in this process, on ``options.devices``.

    Args:
        inputs, masked: as for ``request_of_block``.
        results: where results go; None: all are made.

    Returns:
        of a forward (out, lse); of a backward the gradients of query, key and value, then those of
        bias and sinks where they are wanted.
    """
    results = results or BlockResults()
    tensors, request, backward_inputs = request_of_block(
        call, block, inputs, options, results, masked
    )
    if backward_inputs is None:
        return run_forward(tensors, request)
    return run_backward(tensors, request, backward_inputs)


@contextmanager
def _computing(device: torch.device) -> Iterator[None]:
    """For what a device computes: without gradients and autocast, by our error out of memory."""
    with backend_of(device).current(device), numbers_only(), our_out_of_memory():
        yield


def check_forward(
    call: WholeCall,
    block: CallBlock,
    inputs: Mapping[str, torch.Tensor],
    options: CallOptions,
    blocks: int = 1,
) -> None:
    """Check that a log-sum-exp, which comes from elsewhere, is that of this call: a few rows of a
    backward's block, drawn anew each time, are computed again.

    Errors in other rows are not seen, nor in the output. Not checked are kernels that compute
    another attention, and budgets too small for the forward of a row.

    Args:
        blocks: how many blocks of the call are checked.

    Raises:
        ValueError: some rows, computed again, have another.
    """
    kernel = None if options.kernel == "auto" else get_kernel(options.kernel)
    other = kernel is not None and (kernel.own_attention or kernel.plain_variant is not None)
    if other or 0 in (inputs["query"].numel(), inputs["value"].numel()):
        return
    # The log-sum-exp is the same without dropout.
    call = replace(call, dropout=None)
    options = CallOptions(options.budget, devices=options.devices)
    key, width = inputs["key"], inputs["query"].shape[-1]
    scale = width**-0.5 if call.scale is None else call.scale
    # Scores are at most as large as products of norms.
    key_norm = max(abs(float(end)) for end in torch.aminmax(key)) * width**0.5
    n, draw = block.rows.length, random.SystemRandom()  # leaves the program's generators alone
    parts = min(n, ceil_div(_CHECKED_ROWS, blocks))
    for part in range(parts):
        at = draw.randrange(n * part // parts, n * (part + 1) // parts)
        row = block.rows.start + at
        last = min(row + 1, block.keys.stop) if call.shape.is_causal else block.keys.stop
        keys = Interval(block.keys.start, last)
        read = {name: inputs[name][:, :, : keys.length] for name in ("key", "value")}
        read["query"], lse = (inputs[name][:, :, at : at + 1] for name in ("query", "lse"))
        one = block._replace(rows=Interval(row, row + 1), keys=keys)
        try:
            now = compute_block(call, one, read, options)[1]
        except BudgetError:
            return  # where the backward fits none the less, it is not checked
        # Of a GPU's TF32 products ten bits are right. What has overflowed says nothing.
        size = abs(scale) * key_norm * read["query"].to(now).norm(dim=-1)
        if bool(((now - lse.to(now)).abs() > 1e-3 + size * 2.0**-9).any()):
            how = "causal" if call.shape.is_causal else "not causal"
            raise ValueError(
                "out and lse are from another forward: the lse of a few rows, computed again "
                f"({how}, scale {scale:.6g}), differs; give the backward the forward's inputs, "
                "mask and options"
            )


def _mask_gradient_bytes(tensors: Tensors, request: Request) -> int:
    """Bytes of the mask's gradient that the budget counts."""
    mask = tensors.bias
    return mask.nbytes if mask is not None and mask.device == request.options.device else 0


def _mask_target(tensors: Tensors, backward_inputs: BackwardInputs) -> tuple[torch.Tensor, ...]:
    """What the mask's gradient is written to, if it is wanted: the caller's tensor, or one where
    the mask is."""
    mask = tensors.bias
    if backward_inputs.grad_mask is False or mask is None:
        return ()
    if isinstance(backward_inputs.grad_mask, torch.Tensor):
        return (backward_inputs.grad_mask,)
    return (empty(tuple(mask.shape), mask.dtype, mask.device, "the mask's gradient"),)


def _mask_gradient(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs, problem: Problem
) -> tuple[torch.Tensor, ...]:
    """The gradient of the mask, if it is wanted. It comes before the other gradients, which are
    results that would take from what its tiles may use."""
    if backward_inputs.grad_mask is False:
        return ()
    check_mask_gradient(problem.kernel)
    with _computing(request.options.device):
        targets = _mask_target(tensors, backward_inputs)
        if backward_inputs.grad_mask is not True:
            torch.autograd.graph.increment_version(targets)
        upstream = Saved(backward_inputs.grad_out, backward_inputs.out, backward_inputs.lse)
        job = _job_of(tensors, request, problem)
        recoveries = add_up_mask_gradient(job, upstream, targets[0], request.options.budget_bytes)
        if request.report is not None:
            how = f"computed tile by tile, beside kernel {problem.kernel.name}"
            request.report.mask_gradient = [how, *recoveries]
        return targets


def beside(request: Request, held: int, what: str, run: Callable[[Request], _Result]) -> _Result:
    """``run`` with the budget that ``held`` bytes of ``what`` leave; a BudgetError says both."""
    budget = request.options.budget_bytes
    if not held or budget is None:
        return run(request)
    left = replace(request.options, budget_bytes=max(0, budget - held))
    try:
        return run(replace(request, options=left))
    except BudgetError as error:
        if error.smallest_bytes is None:
            raise
        smallest = error.smallest_bytes + held
        raise BudgetError(
            f"a budget of {format_bytes(budget)} ({budget} bytes) is too small for this call; the "
            f"smallest that works is {format_least(smallest)} ({smallest} bytes): {what} "
            f"{format_bytes(held)}, and beside that {error}",
            smallest_bytes=smallest,
        ) from None


def _run(
    tensors: Tensors,
    request: Request,
    decision: Decision,
    results: Mapping[str, torch.Tensor],
    backward_inputs: BackwardInputs | None = None,
) -> tuple[torch.Tensor, ...]:
    """The results of a pass, and its report.

    Args:
        results: those that are preallocated, by the names of their states.
        backward_inputs: what a backward reads beside the inputs.
    """
    _cache_call(request, backward_inputs, decision)
    device, watched, made = request.options.device, request.report, None
    report = PassReport(decision.problem.kernel.name)
    if decision.plan is None:
        begun = time.perf_counter()
        made = _run_one_call(tensors, request, decision.problem, results, backward_inputs)
        report.seconds = time.perf_counter() - begun
    if made is None:
        decision = with_plan(decision) if decision.plan is None else decision
        plan = decision.plan
        assert plan is not None
        log_cut(plan)
        report = _pass_report(plan, timed=watched is not None and watched.timed)
        if watched is not None:
            watched.pool = None
            if request.dropout is not None:
                report.dropout_p, report.dropout_seed = request.dropout.p, request.dropout.seed
            setattr(watched, "forward" if backward_inputs is None else "backward", report)
        with _computing(device), progress_of(request) as progress:
            counted = None if watched is None else backend_of(device).count_peak(device)
            for tensor in results.values():
                # Kernels and copies by address do not tell autograd that they write. A backward
                # that saved one of these tensors would read the new values without an error.
                torch.autograd.graph.increment_version(tensor)
            # No name for the job: it would hold its results when memory has run out.
            made = run_pass(
                _job_of(tensors, request, decision.problem, results, backward_inputs),
                plan.schedule, report, progress,
            )  # fmt: skip
            if counted is not None:
                report.peak_bytes = counted()
    for sums in request.sums:
        sums.total.add(report, backward=backward_inputs is not None)
    preallocated = [id(result) for result in results.values()]
    return tuple([r if id(r) in preallocated else _detach_view(r) for r in made])


def _run_one_call(
    tensors: Tensors, request: Request, problem: Problem, results: Mapping[str, torch.Tensor],
    backward_inputs: BackwardInputs | None,
) -> tuple[torch.Tensor, ...] | None:  # fmt: skip
    """The results of one kernel call; None if the pass has to be planned: memory ran out, or
    gradients in 16 bits are not finite."""
    job, device = (
        _job_of(tensors, request, problem, results, backward_inputs),
        request.options.device,
    )
    backend = backend_of(device)
    try:
        with backend.current(device), numbers_only():
            return single_kernel_call(job)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    backend.give_back_cached()
    return None


def _pass_report(plan: Plan, *, timed: bool) -> PassReport:
    schedule, route, levels = plan.schedule, plan.schedule.route, plan.levels
    return PassReport(
        plan.kernel, levels, planned_levels=levels, n_groups=plan.n_groups,
        heads_per_group=schedule.group.kv_heads * plan.shape.queries_per_key_head,
        n_cap=route.n_cap, accumulator=route.accumulator, streams=route.streams,
        planned_peak_bytes=plan.peak_bytes, budget_bytes=plan.budget_bytes, timed=timed,
    )  # fmt: skip


def progress_of(request: Request) -> AbstractContextManager[Progress | None]:
    """A context that gives what progress of the call is told to, or None."""
    if request.progress is True:
        from quorum_attention.progress import progress_bar  # rich, only where it is shown

        return progress_bar()
    return nullcontext(None if request.progress is False else request.progress)


def _is_trivial(tensors: Tensors) -> bool:
    """Whether the results are empty or all zeros."""
    return 0 in (tensors.query.numel(), tensors.value.numel())


def _detach_view(made: torch.Tensor) -> torch.Tensor:
    """A result that autograd does not know as a view: a caller may not write in place to a view
    that was made without gradients."""
    return made.data if made._is_view() else made


def _job_of(
    tensors: Tensors,
    request: Request,
    problem: Problem,
    results: Mapping[str, torch.Tensor] | None = None,
    backward_inputs: BackwardInputs | None = None,
) -> PassJob:
    """The job of a pass.

    Args:
        results: those that are preallocated, by the names of their states.
        backward_inputs: what a backward reads besides; None for a forward.
    """
    device, shape, mask, sinks = request.options.device, request.shape, tensors.bias, tensors.sinks
    three = [t.detach() if t.requires_grad else t for t in tensors[:3]]
    job = PassJob(
        problem, dict(zip(_NAMES, three, strict=True)), request.scale, device,
        None if mask is None else BiasView(mask, len(shape.batch_shape)),
        None if sinks is None else sinks.detach().to(device, shape.state_dtype),
        request.dropout, dict(results or {}),
    )  # fmt: skip
    if backward_inputs is not None:
        upstream, job.divisor = rescale_upstream(backward_inputs.grad_out, problem, device)
        job.tensors.update(out=backward_inputs.out, grad_out=upstream, lse=backward_inputs.lse)
    return job
