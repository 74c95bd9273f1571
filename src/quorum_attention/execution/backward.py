"""The backward pass: three gradients, added up over the tasks (paper, Algorithm 2).

With the global log-sum-exp every task computes its part of the true probabilities,
P = exp(s - lse) <= 1, so gradients of tasks simply add (paper, Equation 9).
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from quorum_attention.execution.call import Call, empty_result, flat_batch
from quorum_attention.execution.engine import Input, Pass, State, Unit
from quorum_attention.execution.forward import (
    accumulator,
    gathered,
    inputs,
    runs_directly,
    whole_rectangle,
)
from quorum_attention.execution.masks import no_bias
from quorum_attention.execution.memory import give_back_cached, is_out_of_memory
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.rows import Axis, GroupBuffer, RowTensor
from quorum_attention.execution.runner import Progress, run
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.slots import backward_layout
from quorum_attention.execution.workload import GroupSize, groups
from quorum_attention.kernels.protocol import Gradients
from quorum_attention.kernels.rectangles import RectangleKernel

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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

    grad_out and out: (*batch, heads, n_queries, value_dim) in the input dtype, anywhere; lse:
    (*batch, heads, n_queries) as the forward returned it.
    """
    started = time.perf_counter()
    try:
        if runs_directly(call, schedule) and grad_out.device == out.device == call.device:
            failure = None
            try:
                return _direct(call, schedule, grad_out, out, lse, grads, report, progress)
            except Exception as error:
                if schedule.pinned or not is_out_of_memory(error):
                    raise
                failure = str(error).split("\n")[0]
            give_back_cached(call.device)
            report.recoveries.append(f"monolithic call out of memory ({failure}): depth 0 -> 1")
            schedule = replace(schedule.deeper(call.work), n_cap=1)
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
    assert isinstance(kernel, RectangleKernel)
    rectangle = whole_rectangle(work, schedule)
    assert rectangle is not None
    task = schedule.decomposition.task(())
    lse = lse.to(call.device)
    # A row without a key has lse -inf; with 0 in its place exp(-inf - 0) is 0, not NaN.
    lse = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    tensors = (grad_out, call.query, call.key, call.value, out)
    flat = [flat_batch(t) for t in tensors]
    every = GroupSize(work.batch, work.kv_heads)
    whole = schedule.group == every and all(t is not None for t in flat)
    parts = list(groups(work, every if whole else replace(schedule.group, batch=1)))
    report.accumulator = "none"
    if not whole and grads is None:
        grads = _empty_gradients(call)
    for count, group in enumerate(parts):
        if whole:
            pieces = [t for t in flat if t is not None]
            piece_lse = lse.reshape(work.batch, work.heads, work.n_queries)
        else:
            entry = group.entries[0]
            of_query = (True, True, False, False, True)
            pieces = [
                t[entry][group.query_heads if q else group.key_heads].unsqueeze(0)
                for t, q in zip(tensors, of_query, strict=True)
            ]
            piece_lse = lse[entry][group.query_heads].unsqueeze(0)
        bias = call.mask.bias(group, task, work.dtype, call.device) if call.mask else no_bias
        piece_grad, query, key, value, piece_out = pieces
        got = kernel.rectangle_backward(
            piece_grad,
            query,
            key,
            value,
            piece_out,
            piece_lse,
            rectangle.causal,
            call.scale,
            bias(rectangle),
        )
        report.units += 1
        if progress is not None:
            progress(count + 1, len(parts), "backward")
        if whole:
            shaped = tuple(
                g.reshape(t.shape).to(t.dtype)
                for g, t in zip(got, (call.query, call.key, call.value), strict=True)
            )
            if grads is None:
                return shaped[0], shaped[1], shaped[2]
            for target, part in zip(grads, shaped, strict=True):
                target.copy_(part)
            return grads
        assert grads is not None
        entry = group.entries[0]
        heads = (group.query_heads, group.key_heads, group.key_heads)
        for target, part, which in zip(grads, got, heads, strict=True):
            target[entry][which] = part[0].to(target.dtype)
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
    axes: tuple[Axis, Axis, Axis] = ("query", "key", "key")
    names = ("query", "key", "value")
    homes: list[RowTensor | GroupBuffer] = []
    finals = [RowTensor(g, axis) for g, axis in zip(grads, axes, strict=True)]
    dtype = grads[0].dtype
    for final, axis in zip(finals, axes, strict=True):
        if dtype == work.state_dtype:
            homes.append(final)
        else:
            width = final.tensor.shape[-1]
            buffer = accumulator(schedule, work, width, home_device, axis)
            homes.append(GroupBuffer(buffer, axis))
    extra = (
        Input("out", RowTensor(out, "query")),
        Input("grad_out", RowTensor(grad_out, "query")),
        Input("lse", RowTensor(lse.unsqueeze(-1), "query")),
    )

    def make_pass(schedule: Schedule) -> Pass:
        layout = backward_layout(
            work, schedule.group, schedule.decomposition.max_task_tokens, dtype
        )

        def compute(unit: Unit) -> None:
            fields = unit.fields
            call.kernel.backward(
                gathered(call, schedule, unit),
                Gradients(
                    grad_out=fields["grad_out"],
                    out=fields["out"],
                    lse=fields["lse"].squeeze(-1),
                    grad_query=fields["state_query"],
                    grad_key=fields["state_key"],
                    grad_value=fields["state_value"],
                ),
            )

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
        return Pass(work, layout, (*inputs(call), *extra), states, compute)

    host = [call.query, call.key, call.value, grad_out, out, lse, *grads]
    host.extend(home.tensor for home in homes if isinstance(home, GroupBuffer))
    run(make_pass, schedule, work, call.device, host, report, progress, "backward")
    return grads
