"""The forward pass: statistics of every row, merged over the tasks (paper, Algorithm 1)."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from quorum_attention.decomposition import Decomposition, Rectangle
from quorum_attention.execution.call import Call, empty_result, flat_batch
from quorum_attention.execution.engine import Input, Pass, State, Unit
from quorum_attention.execution.masks import no_bias
from quorum_attention.execution.memory import give_back_cached, is_out_of_memory
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.rows import GroupBuffer, RowTensor
from quorum_attention.execution.runner import Progress, run
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.slots import forward_layout
from quorum_attention.execution.workload import GroupSize, Workload, groups
from quorum_attention.kernels.protocol import InnerKernel, Statistics, TaskTensors
from quorum_attention.kernels.rectangles import RectangleKernel


def forward(
    call: Call,
    schedule: Schedule,
    *,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    report: PassReport,
    progress: Progress | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): out (*batch, heads, n_queries, value_dim) in ``out_dtype`` where the inputs are
    (or ``out``, filled); lse (*batch, heads, n_queries), natural log, in the state dtype."""
    started = time.perf_counter()
    try:
        if runs_directly(call, schedule):
            failure = None
            try:
                return _direct(call, schedule, out, out_dtype, report, progress)
            except Exception as error:
                if schedule.pinned or not is_out_of_memory(error):
                    raise
                failure = str(error).split("\n")[0]
            give_back_cached(call.device)
            report.recoveries.append(f"monolithic call out of memory ({failure}): depth 0 -> 1")
            schedule = replace(schedule.deeper(call.work), n_cap=1)
        return _through_slots(call, schedule, out, out_dtype, report, progress)
    finally:
        report.seconds = time.perf_counter() - started


def runs_directly(call: Call, schedule: Schedule) -> bool:
    """Whether the inner kernel can take the inputs as they lie: no slots, nothing to merge."""
    return call.resident and runs_whole(call.work, schedule, call.kernel)


def runs_whole(work: Workload, schedule: Schedule, kernel: InnerKernel) -> bool:
    """Whether ``kernel`` can take all of a head group in one call of its operator."""
    masked = work.mask is not None
    return (
        schedule.decomposition.depth == 0
        and isinstance(kernel, RectangleKernel)
        and kernel.takes_whole(work.heads, work.kv_heads, work.n_tokens, masked)
        and whole_rectangle(work, schedule) is not None
    )


def whole_rectangle(work: Workload, schedule: Schedule) -> Rectangle | None:
    """The rectangle that is the whole call, None where it takes more than one."""
    rectangles = _rectangles(work, schedule, schedule.decomposition)
    return rectangles[0] if len(rectangles) == 1 else None


def _rectangles(
    work: Workload, schedule: Schedule, decomposition: Decomposition
) -> tuple[Rectangle, ...]:
    return decomposition.task(()).rectangles(
        work.is_causal, work.n_queries, work.n_keys, schedule.max_queries, schedule.max_keys
    )


def _direct(
    call: Call,
    schedule: Schedule,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    report: PassReport,
    progress: Progress | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    work, kernel = call.work, call.kernel
    assert isinstance(kernel, RectangleKernel)
    rectangle = whole_rectangle(work, schedule)
    assert rectangle is not None
    task = schedule.decomposition.task(())
    flat = [flat_batch(t) for t in (call.query, call.key, call.value)]
    every = GroupSize(work.batch, work.kv_heads)
    whole = schedule.group == every and all(t is not None for t in flat)
    parts = list(groups(work, every if whole else replace(schedule.group, batch=1)))
    report.accumulator = "none"
    lse = None
    if not whole:
        shape = (*work.batch_shape, work.heads, work.n_queries)
        if out is None:
            out = empty_result((*shape, work.value_dim), out_dtype, call.query.device, "the output")
        lse = empty_result(shape, work.state_dtype, call.query.device, "the log-sum-exp")
    for count, group in enumerate(parts):
        if whole:
            query, key, value = (t for t in flat if t is not None)
        else:
            entry = group.entries[0]
            query = call.query[entry][group.query_heads].unsqueeze(0)
            key = call.key[entry][group.key_heads].unsqueeze(0)
            value = call.value[entry][group.key_heads].unsqueeze(0)
        bias = call.mask.bias(group, task, work.dtype, call.device) if call.mask else no_bias
        part, part_lse = kernel.whole_forward(
            query, key, value, rectangle.causal, call.scale, bias(rectangle)
        )
        report.units += 1
        if progress is not None:
            progress(count + 1, len(parts), "forward")
        if whole:
            lse = part_lse.reshape(*work.batch_shape, work.heads, work.n_queries)
            part = part.reshape(*work.batch_shape, work.heads, work.n_queries, work.value_dim)
            if out is None:
                return part.to(out_dtype), lse
            out.copy_(part)
            return out, lse
        assert out is not None and lse is not None
        entry = group.entries[0]
        out[entry][group.query_heads] = part[0].to(out_dtype)
        lse[entry][group.query_heads] = part_lse[0]
    assert out is not None and lse is not None
    return out, lse


def _through_slots(
    call: Call,
    schedule: Schedule,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    report: PassReport,
    progress: Progress | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    work = call.work
    state = work.state_dtype
    home_device = call.device if schedule.accumulator == "device" else torch.device("cpu")
    rows = (*work.batch_shape, work.heads, work.n_queries)
    if out is None:
        out = empty_result((*rows, work.value_dim), out_dtype, call.query.device, "the output")
    lse = empty_result(rows, state, home_device, "the log-sum-exp")
    final = RowTensor(out, "query")
    home: RowTensor | GroupBuffer = final
    if out_dtype != state:
        home = GroupBuffer(accumulator(schedule, work, work.value_dim, home_device, "query"), "query")
    report.accumulator = schedule.accumulator
    lse_rows = RowTensor(lse.unsqueeze(-1), "query")

    def make_pass(schedule: Schedule) -> Pass:
        layout = forward_layout(
            work, schedule.group, schedule.decomposition.max_task_tokens, out_dtype
        )

        def compute(unit: Unit) -> None:
            call.kernel.forward(
                gathered(call, schedule, unit),
                Statistics(unit.fields["state_out"], unit.fields["state_lse"].squeeze(-1)),
            )

        return Pass(
            work,
            layout,
            inputs(call),
            (
                State("state_out", 0.0, home, final, "final_out" if out_dtype != state else None),
                State("state_lse", float("-inf"), lse_rows, lse_rows, None),
            ),
            compute,
        )

    host = [call.query, call.key, call.value, out, lse]
    if isinstance(home, GroupBuffer):
        host.append(home.tensor)
    run(make_pass, schedule, work, call.device, host, report, progress, "forward")
    return out, lse


def inputs(call: Call) -> tuple[Input, ...]:
    """Query, key and value, as every pass reads them."""
    return (
        Input("query", RowTensor(call.query, "query")),
        Input("key", RowTensor(call.key, "key")),
        Input("value", RowTensor(call.value, "key")),
    )


def gathered(call: Call, schedule: Schedule, unit: Unit) -> TaskTensors:
    """What the inner kernel gets of a unit."""
    work, task = call.work, unit.visit.task
    bias = call.mask.bias(unit.group, task, work.dtype, call.device) if call.mask else no_bias
    return TaskTensors(
        task=task,
        rectangles=task.rectangles(
            work.is_causal, work.n_queries, work.n_keys, schedule.max_queries, schedule.max_keys
        ),
        query=unit.fields["query"],
        key=unit.fields["key"],
        value=unit.fields["value"],
        scale=call.scale,
        is_causal=work.is_causal,
        bias=bias,
    )


def accumulator(
    schedule: Schedule, work: Workload, width: int, device: torch.device, axis: str
) -> torch.Tensor:
    """Where the state of one head group waits: (entries, heads, n, width) in the state dtype."""
    heads = schedule.group.kv_heads
    n = work.n_keys
    if axis == "query":
        heads *= work.queries_per_key_head
        n = work.n_queries
    shape = (schedule.group.batch, heads, n, width)
    return empty_result(shape, work.state_dtype, device, "the accumulator")


