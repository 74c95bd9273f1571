"""One pass of a call, forward or backward, on checked arguments: planned, run, reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

import torch

from quorum_attention.call.options import Options
from quorum_attention.execution.call import Call, Three, is_operand, lie_well
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.job import Job, backward_job, forward_job
from quorum_attention.execution.masks import MaskView
from quorum_attention.execution.memory import first_line, is_out_of_memory, named_out_of_memory
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.routes.whole import at_once
from quorum_attention.execution.run_pass import run_pass
from quorum_attention.execution.scaling import scales
from quorum_attention.execution.tools import Progress
from quorum_attention.execution.upstream import Upstream, divided_bytes, outreaches, upstream_of
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.delta import exact_carrier
from quorum_attention.kernels.outside import without_autocast
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.planner import options as planner_options
from quorum_attention.planner.decide import Asked, Decision, decide, decide_again, decide_both
from quorum_attention.planner.footprint import Placement, corrected_bytes
from quorum_attention.planner.plan import Plan

_Result = TypeVar("_Result")


def _run(
    asked: Asked,
    decision: Decision,
    options: Options,
    attempt: Callable[[Decision, Plan, PassReport, Progress | None], _Result],
    note: Callable[[PassReport], None],
) -> _Result:
    """The result by the first plan that does not run out of memory."""
    recoveries: list[str] = []
    while True:
        plan = decision.plan
        assert plan is not None, "what is run without one is not reported"
        report = _pass_report(plan, options)
        report.recoveries.extend(recoveries)
        note(report)
        with (
            backend_of(options.device).current(options.device),
            _peak_memory(options, report),
            _progress(options) as progress,
            torch.no_grad(),
            without_autocast("cpu", options.device.type),
            named_out_of_memory(pinned=plan.schedule.pinned),
        ):
            try:
                return attempt(decision, plan, report, progress)
            except Exception as error:
                if decision.last or not is_out_of_memory(error):
                    raise
                failure = first_line(error)
        backend_of(options.device).give_back_cached()
        recoveries.append(f"monolithic call out of memory ({failure}): planned anew")
        decision = decide_again(asked, decision)


def _at_once(options: Options, job: Job) -> tuple[torch.Tensor, ...] | None:
    """The results of a small call; None where it runs out of memory, and has to be planned."""
    try:
        with (
            backend_of(options.device).current(options.device),
            torch.no_grad(),
            without_autocast("cpu", options.device.type),
        ):
            return at_once(job)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    backend_of(options.device).give_back_cached()
    return None


def _pass_report(plan: Plan, options: Options) -> PassReport:
    return PassReport(
        kernel=plan.kernel,
        levels=plan.levels,
        planned_levels=plan.levels,
        n_groups=plan.n_groups,
        heads_per_group=plan.schedule.group.kv_heads * plan.work.queries_per_key_head,
        n_cap=plan.schedule.n_cap,
        accumulator=plan.schedule.accumulator,
        streams=plan.schedule.streams,
        planned_peak_bytes=plan.peak_bytes,
        budget_bytes=plan.budget_bytes,
        timed=options.report is not None,
    )


@contextmanager
def _peak_memory(options: Options, report: PassReport) -> Iterator[None]:
    """Measures what the device's allocator hands out at most, where somebody asked for a report."""
    counted = None
    if options.report is not None:
        counted = backend_of(options.device).count_peak(options.device)
    try:
        yield
    finally:
        if counted is not None:
            report.peak_bytes = counted()


def _progress(options: Options) -> AbstractContextManager[Progress | None]:
    if options.progress is None or options.progress is False:
        return nullcontext(None)
    if options.progress is True:
        from quorum_attention.progress import progress_bar  # rich, only where it is shown

        return progress_bar()
    return nullcontext(options.progress)


def _wishes(options: Options) -> planner_options.Options:
    return planner_options.Options(
        options.device, options.kernel, options.budget_bytes, options.plan, options.depth,
        options.accumulator, options.report is not None or bool(options.progress),
    )  # fmt: skip


def _place_after(place: Placement, work: Workload, out_is_copied: bool) -> Placement:
    """Of the backward after a forward, whatever gradient autograd hands over: an expanded one is
    copied.

    Args:
        place: the forward's.
        out_is_copied: operators cannot take the output as it lies, or will lie.
    """
    result = place.result_dtype
    divided = outreaches(result, work.dtype)
    return replace(
        place,
        results_given=False,
        result_dtype=work.dtype,
        copied=(not divided) + out_is_copied,
        copied_bytes=divided_bytes(result, work) if place.resident else 0,
        divided=divided,
    )


def _is_trivial(work: Workload) -> bool:
    return 0 in (work.batch, work.heads, work.n_queries, work.n_keys, work.value_dim)


def run_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    work: Workload,
    options: Options,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    needs_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan the forward and run it, on checked arguments."""
    if options.scale <= 0:
        work = replace(work, positive_scale=False)
    if _is_trivial(work):
        rows = tuple(query.shape[:-1])
        if out is None:
            out = torch.empty((*rows, work.value_dim), dtype=out_dtype, device=query.device)
        lse = torch.full(rows, float("-inf"), dtype=work.state_dtype, device=query.device)
        return out.zero_(), lse
    place = Placement(
        options.device.type,
        query.device == options.device,
        out is not None,
        out_dtype,
        lie_well(query, key, value),
    )
    asked = Asked(work, _wishes(options), place, out_dtype, needs_grad, False)
    if needs_grad and options.budget_bytes is not None:
        copied = out is not None and not is_operand(out, work.dtype)
        after = _place_after(place, work, copied or out_dtype != work.dtype)
        decision = decide_both(asked, replace(asked, place=after, backward=True))
    else:
        decision = decide(asked)
    if decision.plan is None:
        call = _call(query, key, value, work, options, decision.kernel)
        found = _at_once(options, forward_job(call, out_dtype))
        if found is not None:
            return _whole(found[0]), _whole(found[1])
        decision = decide_again(asked, decision)

    def attempt(
        decision: Decision, plan: Plan, report: PassReport, progress: Progress | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _note_writing(() if out is None else (out,))
        call = _call(query, key, value, work, options, decision.kernel)
        made, lse = run_pass(forward_job(call, out_dtype, out, report, progress), plan.schedule)
        return made, lse

    def note(report: PassReport) -> None:
        if options.report is not None:
            options.report.forward = report

    result, lse = _run(asked, decision, options, attempt, note)
    return (result if out is not None else _whole(result)), _whole(lse)


def run_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    work: Workload,
    options: Options,
    grads: Three | None = None,
) -> Three:
    """Plan the backward and run it, on checked arguments."""
    if options.scale <= 0:
        work = replace(work, positive_scale=False)
    if _is_trivial(work):
        if grads is None:
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        return grads[0].zero_(), grads[1].zero_(), grads[2].zero_()
    dtype = work.dtype if grads is None else grads[0].dtype
    divided = outreaches(grad_out.dtype, work.dtype)
    place = Placement(
        options.device.type,
        query.device == options.device,
        grads is not None,
        dtype,
        lie_well(query, key, value),
        # A gradient that need not be copied is planned for as one that must: as estimated.
        (not divided) + (not is_operand(out, work.dtype)),
        divided_bytes(grad_out.dtype, work) if grad_out.device == options.device else 0,
        divided,
    )
    asked = Asked(work, _wishes(options), place, out.dtype, True, True)
    decision = decide(asked)
    here = all(t.device == options.device for t in (grad_out, out, lse))
    if decision.plan is None:
        if grad_out.dtype == out.dtype == work.dtype and here:
            call = _call(query, key, value, work, options, decision.kernel)
            carrier = _carrier(call, options, grad_out, out, lse)
            found = _at_once(options, backward_job(call, Upstream(grad_out), carrier, lse))
            if found is not None:
                return _whole(found[0]), _whole(found[1]), _whole(found[2])
        decision = decide_again(asked, decision)

    def attempt(
        decision: Decision, plan: Plan, report: PassReport, progress: Progress | None
    ) -> Three:
        _note_writing(() if grads is None else grads)
        call = _call(query, key, value, work, options, decision.kernel)
        scaled = scales(decision.kernel, work)
        upstream = upstream_of(grad_out, work, options.device, scaled=scaled)
        carrier = _carrier(call, options, upstream.tensor, out, lse)
        job = backward_job(call, upstream, carrier, lse, grads, report, progress)
        made = run_pass(job, plan.schedule)
        return made[0], made[1], made[2]

    def note(report: PassReport) -> None:
        if options.report is not None:
            options.report.backward = report

    found = _run(asked, decision, options, attempt, note)
    return found if grads is not None else (_whole(found[0]), _whole(found[1]), _whole(found[2]))


def _whole(made: torch.Tensor) -> torch.Tensor:
    """A tensor that was made here as no view of another, which autograd would let nobody write to:
    that views were made here, without gradients, is nobody's business."""
    return made.data if made._is_view() else made


def _carrier(
    call: Call, options: Options, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """``out``, or what stands for it in delta where its rounding is all that is left of dS; for
    ``grad_out`` as kernels get it."""
    together = grad_out.device == out.device == call.query.device
    if not together or not corrected_bytes(call.work, call.kernel):
        return out
    with torch.no_grad():
        return exact_carrier(
            grad_out, call.query, call.key, call.value, out.to(call.work.dtype),
            lse.to(out.device), options.attn_mask, options.is_causal, options.scale,
        )  # fmt: skip


def _note_writing(results: tuple[torch.Tensor, ...]) -> None:
    """Tell autograd that preallocated results are written from here on: copies by address and
    kernels do not, and what was saved of them for a backward would be used without a word."""
    for tensor in results:
        torch.autograd.graph.increment_version(tensor)


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    work: Workload,
    options: Options,
    kernel: InnerKernel,
) -> Call:
    mask = None
    if options.attn_mask is not None:
        mask = MaskView(options.attn_mask, len(work.batch_shape))
    return Call(
        work,
        query.detach(),
        key.detach(),
        value.detach(),
        mask,
        options.scale,
        options.device,
        kernel,
    )
