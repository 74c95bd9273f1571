"""The backward pass: three gradients, added up over the tasks (paper, Algorithm 2).

With the global log-sum-exp every task computes its part of the true probabilities,
P = exp(s - lse) <= 1, so gradients of tasks simply add (paper, Equation 9).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from quorum_attention.execution.call import AXES, BackwardResults, Call, Three, operand
from quorum_attention.execution.direct import Piece, gives_directly, pieces, runs_directly
from quorum_attention.execution.engine import Input, Pass, State, Unit
from quorum_attention.execution.forward import accumulator, gathered, inputs
from quorum_attention.execution.in_place import as_they_lie, backward_in_place
from quorum_attention.execution.recovery import AsTheyLie, run_pass
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.rows import GroupBuffer, RowTensor
from quorum_attention.execution.runner import run
from quorum_attention.execution.scaling import BackwardScaling, all_finite, scales
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.slots import backward_layout
from quorum_attention.execution.sweep import backward_group, backward_sweep, sweeps
from quorum_attention.execution.tools import Progress, Tools, make_tools
from quorum_attention.execution.upstream import Upstream
from quorum_attention.execution.workload import Group, groups
from quorum_attention.kernels.outside import capturing
from quorum_attention.kernels.protocol import Gradients
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.traits import whole_calls


def backward(
    call: Call,
    schedule: Schedule,
    upstream: Upstream,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    grads: Three | None,
    report: PassReport,
    progress: Progress | None = None,
) -> Three:
    """(grad_query, grad_key, grad_value), in the shapes, dtypes and places of the inputs, or
    ``grads``, filled.

    out: (*batch, heads, n_queries, value_dim), anywhere, however it lies, as the upstream gradient;
    lse: (*batch, heads, n_queries) as the forward returned it.
    """
    started = time.perf_counter()
    results = BackwardResults(call, grads)
    here = upstream.tensor.device == out.device == call.device
    divided = upstream.divisor is not None
    lying: AsTheyLie | None = None
    if (
        sweeps(call, schedule)
        and here
        and lse.device == call.device
        and not (divided and schedule.one_by_one)
    ):
        tools = make_tools(call.device, schedule, timed=report.timed)
        report.accumulator = "device"
        report.left_out = 0.0 if schedule.trimmed is None else schedule.trimmed.left_out
        if schedule.one_by_one:
            work = backward_in_place(
                call, schedule, upstream.tensor, out, lse, results, tools, progress
            )
        else:
            work = backward_sweep(
                call, schedule, upstream, out, lse, results, tools, progress, report
            )
        everything = tuple(groups(call.work, schedule.group))
        lying = AsTheyLie(everything, work, schedule.decomposition.n_tasks, tools.clock)
    elif (
        runs_directly(call, schedule)
        and here
        and gives_directly(call.kernel, call.work, results.dtype, divided=divided)
    ):
        tools = make_tools(call.device, schedule, timed=False)
        report.accumulator = "none"
        parts = pieces(call, schedule, (upstream.tensor, call.query, call.key, call.value, out))
        work = _direct(call, schedule, parts, upstream, out, lse, results, tools, progress, report)
        lying = AsTheyLie(tuple(piece.group for piece in parts), work, units=1)

    def slots(schedule: Schedule, left: list[Group]) -> None:
        _through_slots(call, schedule, left, upstream, out, lse, results, report, progress)

    try:
        run_pass(call, schedule, report, lying, slots)
    finally:
        report.seconds = time.perf_counter() - started
    return results.made()


def _direct(
    call: Call,
    schedule: Schedule,
    parts: Sequence[Piece],
    upstream: Upstream,
    out: torch.Tensor,
    lse: torch.Tensor,
    results: BackwardResults,
    tools: Tools,
    progress: Progress | None,
    report: PassReport,
) -> Iterator[None]:
    """Fill ``results``, a kernel call at a time."""
    work, kernel = call.work, whole_calls(call.kernel)
    assert kernel is not None
    given_lse = lse = lse.to(call.device)
    # A row without a key has lse -inf; with 0 in its place exp(-inf - 0) is 0, not NaN.
    lse = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    checked = scales(call.kernel, call.work) and not capturing(call.device)
    for done, piece in enumerate(parts, start=1):
        got = kernel.whole_backward(
            operand(piece.take(upstream.tensor, "query"), work.dtype),
            piece.take(call.query, "query"),
            piece.take(call.key, "key"),
            piece.take(call.value, "key"),
            operand(piece.take(out, "query"), work.dtype),
            piece.take(lse, "query"),
            piece.rectangle.causal,
            call.scale,
            piece.bias(piece.rectangle),
            None if results.three is None else results.dtype,
        )
        broken = checked and not all_finite(got)
        if piece.whole and results.three is None and not broken:
            like = (call.query, call.key, call.value)
            results.three = tuple(  # type: ignore[assignment]
                part.reshape(t.shape).to(t.dtype) for part, t in zip(got, like, strict=True)
            )
        elif not broken:
            for target, axis, part in zip(results.made(), AXES, got, strict=True):
                piece.put(target, axis, part)
                # Let go before the next piece's are made: the plan counts one piece's results.
                del part
        del got
        if broken:
            report.repeated_units += 1
            _scaled(call, schedule, piece.group, upstream, out, given_lse, results.made(), tools)
        if progress is not None:
            progress(done, len(parts), "backward")
        yield


def _scaled(
    call: Call,
    schedule: Schedule,
    group: Group,
    upstream: Upstream,
    out: torch.Tensor,
    lse: torch.Tensor,
    grads: Three,
    tools: Tools,
) -> None:
    """A head group whose gradients an operator did not bring out finite: scaled, head by head."""
    whole = schedule.decomposition.task(())
    rectangles = whole.rectangles(call.work.is_causal, call.work.n_queries, call.work.n_keys)
    for entry in group.entries:
        for head in range(group.kv_start, group.kv_stop):
            one = replace(group, entries=(entry,), kv_start=head, kv_stop=head + 1)
            task = as_they_lie(call, schedule, one, tools, whole, rectangles)
            if call.mask is not None:
                task.bias = call.mask.bias(one, whole, call.work.dtype, call.device)
            backward_group(call, task, one, upstream, out, lse, grads, tools)


def _through_slots(
    call: Call,
    schedule: Schedule,
    left: list[Group],
    upstream: Upstream,
    out: torch.Tensor,
    lse: torch.Tensor,
    results: BackwardResults,
    report: PassReport,
    progress: Progress | None,
) -> None:
    """Fill ``results`` for the head groups that are ``left``."""
    work = call.work
    grads, grad_out = results.made(), upstream.tensor
    home_device = call.device if schedule.accumulator == "device" else torch.device("cpu")
    report.accumulator = schedule.accumulator
    names = ("query", "key", "value")
    homes: list[RowTensor | GroupBuffer] = []
    finals = [RowTensor(g, axis) for g, axis in zip(grads, AXES, strict=True)]
    dtype = grads[0].dtype
    for final, axis in zip(finals, AXES, strict=True):
        if dtype == work.state_dtype:
            homes.append(final)
        else:
            width = final.tensor.shape[-1]
            buffer = accumulator(call, schedule, width, home_device, axis)
            homes.append(GroupBuffer(buffer, axis))
    extra = (
        Input("out", RowTensor(out, "query")),
        Input("grad_out", RowTensor(grad_out, "query")),
        Input("lse", RowTensor(lse.unsqueeze(-1), "query")),
    )

    scaled = scales(call.kernel, work)
    scalings: list[BackwardScaling] = []

    def make_pass(schedule: Schedule, tools: Tools) -> Pass:
        layout = backward_layout(
            work, schedule.group, schedule.task_rows(work), dtype, scaled=scaled
        )
        scaling = BackwardScaling(work, call.device) if scaled else None
        if scaling is not None:
            scalings.append(scaling)

        def compute(unit: Unit) -> None:
            fields = unit.fields
            call.kernel.backward(
                gathered(call, schedule, unit, tools),
                Gradients(
                    grad_out=fields["grad_out"],
                    out=fields["out"],
                    lse=fields["lse"].squeeze(-1),
                    grad_query=fields["state_query"],
                    grad_key=fields["state_key"],
                    grad_value=fields["state_value"],
                    scaling=Scaling() if scaling is None else scaling.scaling(unit),
                ),
            )
            if scaling is not None:
                scaling.computed(unit)

        states = tuple(
            State(
                f"state_{name}",
                0.0,
                home,
                final,
                f"final_{name}" if dtype != work.state_dtype else None,
            )
            for name, home, final in zip(names, homes, finals, strict=True)
        )
        reused = ("query", "key", "value", "out", "lse", *(() if scaled else ("grad_out",)))
        return Pass(
            work,
            layout,
            (*inputs(call), *extra),
            states,
            compute,
            prepare=None if scaling is None else scaling.prepare,
            spoiled=None if scaling is None else scaling.spoiled,
            mended=None if scaling is None else scaling.mended,
            factor=None if upstream.divisor is None else upstream.factor,
            passed_on=frozenset(filter(layout.keeps, reused)),
        )

    host = [call.query, call.key, call.value, grad_out, out, lse, *grads]
    host.extend(home.tensor for home in homes if isinstance(home, GroupBuffer))
    try:
        run(make_pass, schedule, left, call, host, report, progress, backward=True)
    finally:
        report.repeated_units += sum(scaling.repeated for scaling in scalings)
