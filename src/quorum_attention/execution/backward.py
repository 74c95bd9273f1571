"""The backward pass: three gradients, added up over the tasks (paper, Algorithm 2).

With the global log-sum-exp every task computes its part of the true probabilities,
P = exp(s - lse) <= 1, so gradients of tasks simply add (paper, Equation 9).
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from quorum_attention.execution.call import Call, empty_result, operand
from quorum_attention.execution.direct import pieces, runs_directly
from quorum_attention.execution.engine import Input, Pass, State, Unit
from quorum_attention.execution.forward import accumulator, gathered, inputs, passed_on
from quorum_attention.execution.in_place import backward_in_place
from quorum_attention.execution.memory import (
    first_line,
    give_back_cached,
    is_out_of_memory,
)
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.rows import Axis, GroupBuffer, RowTensor
from quorum_attention.execution.runner import run
from quorum_attention.execution.scaling import BackwardScaling, scales
from quorum_attention.execution.schedule import Schedule, through_slots
from quorum_attention.execution.slots import backward_layout
from quorum_attention.execution.sweep import backward_sweep, sweeps
from quorum_attention.execution.tools import Progress, Tools, make_tools
from quorum_attention.execution.workload import count_groups
from quorum_attention.kernels.protocol import Gradients, WholeCalls
from quorum_attention.kernels.scaling import Scaling

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_AXES: tuple[Axis, Axis, Axis] = ("query", "key", "key")


def backward(
    call: Call,
    schedule: Schedule,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    grads: Three | None,
    report: PassReport,
    progress: Progress | None = None,
) -> Three:
    """(grad_query, grad_key, grad_value), in the shapes, dtypes and places of the inputs, or
    ``grads``, filled.

    grad_out and out: (*batch, heads, n_queries, value_dim), anywhere, however they lie; lse:
    (*batch, heads, n_queries) as the forward returned it.
    """
    started = time.perf_counter()
    try:
        together = grad_out.device == out.device == lse.device == call.device
        if sweeps(call, schedule) and together:
            failure = None
            try:
                return _sweep(call, schedule, grad_out, out, lse, grads, report, progress)
            except Exception as error:
                if schedule.pinned or not is_out_of_memory(error):
                    raise
                failure = first_line(error)
            give_back_cached(call.device)
            report.recovery_seconds += time.perf_counter() - started
            report.recoveries.append(f"inputs in place: out of memory ({failure}): through slots")
            schedule = through_slots(schedule, call.work)
        elif runs_directly(call, schedule) and grad_out.device == out.device == call.device:
            failure = None
            try:
                return _direct(call, schedule, grad_out, out, lse, grads, report, progress)
            except Exception as error:
                if schedule.pinned or not is_out_of_memory(error):
                    raise
                failure = first_line(error)
            give_back_cached(call.device)
            report.recovery_seconds += time.perf_counter() - started
            report.recoveries.append(f"monolithic call out of memory ({failure}): depth 0 -> 1")
            schedule = replace(schedule.deeper(call.work), n_cap=1)
        elif schedule.sweep:
            schedule = through_slots(schedule, call.work)
        return _through_slots(call, schedule, grad_out, out, lse, grads, report, progress)
    finally:
        report.seconds = time.perf_counter() - started


def _empty_gradients(call: Call) -> Three:
    where = call.query.device
    return (
        empty_result(tuple(call.query.shape), call.work.dtype, where, "the query's gradient"),
        empty_result(tuple(call.key.shape), call.work.dtype, where, "the key's gradient"),
        empty_result(tuple(call.value.shape), call.work.dtype, where, "the value's gradient"),
    )


def _sweep(
    call: Call,
    schedule: Schedule,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grads: Three | None,
    report: PassReport,
    progress: Progress | None,
) -> Three:
    report.accumulator = "device"
    grads = _empty_gradients(call) if grads is None else grads
    tools = make_tools(call.device, schedule, timed=report.timed)
    given = (call, schedule, grad_out, out, lse, grads, tools, progress)
    if schedule.one_by_one:
        backward_in_place(*given)
    else:
        report.repeated_units = backward_sweep(*given)
    report.units += schedule.decomposition.n_tasks * count_groups(call.work, schedule.group)
    report.left_out = 0.0 if schedule.trimmed is None else schedule.trimmed.left_out
    report.stages = tools.clock.seconds()
    return grads


def _direct(
    call: Call,
    schedule: Schedule,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grads: Three | None,
    report: PassReport,
    progress: Progress | None,
) -> Three:
    work, kernel = call.work, call.kernel
    assert isinstance(kernel, WholeCalls)
    report.accumulator = "none"
    lse = lse.to(call.device)
    # A row without a key has lse -inf; with 0 in its place exp(-inf - 0) is 0, not NaN.
    lse = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    inputs_of = (call.query, call.key, call.value)
    parts = list(pieces(call, schedule, (grad_out, *inputs_of, out)))
    for done, piece in enumerate(parts, start=1):
        got = kernel.whole_backward(
            operand(piece.take(grad_out, "query"), work.dtype),
            piece.take(call.query, "query"),
            piece.take(call.key, "key"),
            piece.take(call.value, "key"),
            operand(piece.take(out, "query"), work.dtype),
            piece.take(lse, "query"),
            piece.rectangle.causal,
            call.scale,
            piece.bias(piece.rectangle),
            None if grads is None else grads[0].dtype,
        )
        report.units += 1
        if progress is not None:
            progress(done, len(parts), "backward")
        if piece.whole and grads is None:
            query, key, value = (
                g.reshape(t.shape).to(t.dtype) for g, t in zip(got, inputs_of, strict=True)
            )
            return query, key, value
        grads = _empty_gradients(call) if grads is None else grads
        for target, axis, part in zip(grads, _AXES, got, strict=True):
            piece.put(target, axis, part)
        # Let go before the next piece's are made: the plan counts one piece's results, not two.
        del got, part
    assert grads is not None
    return grads


def _through_slots(
    call: Call,
    schedule: Schedule,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grads: Three | None,
    report: PassReport,
    progress: Progress | None,
) -> Three:
    work = call.work
    if grads is None:
        grads = _empty_gradients(call)
    home_device = call.device if schedule.accumulator == "device" else torch.device("cpu")
    report.accumulator = schedule.accumulator
    names = ("query", "key", "value")
    homes: list[RowTensor | GroupBuffer] = []
    finals = [RowTensor(g, axis) for g, axis in zip(grads, _AXES, strict=True)]
    dtype = grads[0].dtype
    for final, axis in zip(finals, _AXES, strict=True):
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
        layout = backward_layout(work, schedule.group, schedule.task_tokens, dtype, scaled=scaled)
        scaling = BackwardScaling(work.n_keys, call.device) if scaled else None
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
            passed_on=passed_on(layout, {name: f"final_{name}" for name in names}, reused),
        )

    host = [call.query, call.key, call.value, grad_out, out, lse, *grads]
    host.extend(home.tensor for home in homes if isinstance(home, GroupBuffer))
    run(make_pass, schedule, call, host, report, progress, backward=True)
    report.repeated_units = sum(scaling.repeated for scaling in scalings)
    return grads
