"""Runs a pass as it was decided, and reports it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.request import Request
from quorum_attention.call.validation import Tensors
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.job import Progress
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.run_pass import run_pass
from quorum_attention.passes.jobs import computing_on, detach_view, job_of
from quorum_attention.passes.one_call import (
    cache_call,
    gives_mask_grad,
    run_single_kernel_call,
)
from quorum_attention.planner.decide import Decision, with_plan
from quorum_attention.planner.plan import Plan, log_cut


def run_decision(
    tensors: Tensors,
    request: Request,
    decision: Decision,
    preallocated: Mapping[str, torch.Tensor],
    backward_inputs: BackwardInputs | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run a pass as it was decided, and report it.

    Args:
        preallocated: the results that the caller gave, by the names of their states.
        backward_inputs: what a backward reads beside the inputs; None for a forward.

    Returns:
        The results, in the order of their states.
    """
    cache_call(tensors, request, backward_inputs, decision)
    results = None
    if decision.plan is None:
        results, report = _run_single_call(
            tensors, request, decision, preallocated, backward_inputs
        )
    if results is None:
        planned = with_plan(decision) if decision.plan is None else decision
        assert planned.plan is not None
        report = _start_report(
            request, planned.plan, backward=backward_inputs is not None
        )
        results = _run_plan(
            tensors,
            request,
            planned.problem,
            planned.plan,
            preallocated,
            backward_inputs,
            report,
        )
    _add_to_totals(request, report, backward=backward_inputs is not None)
    ids_of_preallocated = [id(result) for result in preallocated.values()]
    return tuple(
        [r if id(r) in ids_of_preallocated else detach_view(r) for r in results]
    )


def run_with_mask_grad(
    tensors: Tensors,
    request: Request,
    decision: Decision,
    backward_inputs: BackwardInputs,
) -> tuple[torch.Tensor, ...] | None:
    """Run a backward as one kernel call that also computes the gradient of the mask.

    Returns:
        The gradients of query, key, value and mask; None if the kernel does not compute
        the last one, or memory ran out.
    """
    if not gives_mask_grad(decision, request, backward_inputs):
        return None
    cache_call(tensors, request, backward_inputs, decision)
    results, report = _run_single_call(tensors, request, decision, {}, backward_inputs)
    if results is None:
        return None
    _add_to_totals(request, report, backward=True)
    return tuple(map(detach_view, results))


def _run_single_call(
    tensors: Tensors,
    request: Request,
    decision: Decision,
    preallocated: Mapping[str, torch.Tensor],
    backward_inputs: BackwardInputs | None,
) -> tuple[tuple[torch.Tensor, ...] | None, PassReport]:
    """Run a pass as one kernel call, and return its results, or None, with its
    report."""
    problem = decision.problem
    report = PassReport(problem.kernel.name)
    begun = time.perf_counter()
    results = run_single_kernel_call(
        tensors, request, problem, preallocated, backward_inputs
    )
    report.seconds = time.perf_counter() - begun
    return results, report


def _add_to_totals(request: Request, report: PassReport, *, backward: bool) -> None:
    """Add a pass to the totals of its call's reports."""
    for total_report in request.reports_with_totals:
        total_report.total.add(report, backward=backward)


def _run_plan(
    tensors: Tensors,
    request: Request,
    problem: Problem,
    plan: Plan,
    preallocated: Mapping[str, torch.Tensor],
    backward_inputs: BackwardInputs | None,
    report: PassReport,
) -> tuple[torch.Tensor, ...]:
    """Run a plan; ``report`` is filled."""
    log_cut(plan)
    device = request.options.device
    with computing_on(device), progress_of(request) as progress:
        count_peak = None
        if request.report is not None:
            count_peak = backend_of(device).count_peak(device)
        for tensor in preallocated.values():
            # Kernels and copies by address do not tell autograd that they write. A
            # backward that saved one of these tensors would read the new values without
            # an error.
            torch.autograd.graph.increment_version(tensor)
        # No name for the job: it would hold its results when memory has run out.
        results = run_pass(
            job_of(tensors, request, problem, preallocated, backward_inputs),
            plan.schedule,
            report,
            progress,
        )
        if count_peak is not None:
            report.peak_bytes = count_peak()
    return results


def _start_report(request: Request, plan: Plan, *, backward: bool) -> PassReport:
    """Return the report of a planned pass, which the caller's report holds too."""
    whole_report = request.report
    timed = whole_report is not None and whole_report.timed
    schedule = plan.schedule
    report = PassReport(
        plan.kernel,
        plan.levels,
        planned_levels=plan.levels,
        n_groups=plan.n_groups,
        heads_per_group=schedule.group.kv_heads * plan.shape.queries_per_key_head,
        n_cap=schedule.route.n_cap,
        accumulator=schedule.route.accumulator,
        streams=schedule.route.streams,
        planned_peak_bytes=plan.peak_bytes,
        budget_bytes=plan.budget_bytes,
        timed=timed,
    )
    if whole_report is None:
        return report
    whole_report.pool = None
    if request.dropout is not None:
        report.dropout_p = request.dropout.p
        report.dropout_seed = request.dropout.seed
    if backward:
        whole_report.backward = report
    else:
        whole_report.forward = report
    return report


def progress_of(request: Request) -> AbstractContextManager[Progress | None]:
    """Return a context that gives the function to which progress is reported, or
    None."""
    if request.progress is True:
        from quorum_attention.progress import (
            progress_bar,
        )  # rich, only where it is shown

        return progress_bar()
    return nullcontext(None if request.progress is False else request.progress)
