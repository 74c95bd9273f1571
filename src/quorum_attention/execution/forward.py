"""The forward pass: statistics of every row, merged over the tasks (paper, Algorithm 1)."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from quorum_attention.execution.call import Call, empty_result, travelling_home
from quorum_attention.execution.direct import pieces, runs_directly
from quorum_attention.execution.engine import Input, Pass, State, Unit
from quorum_attention.execution.in_place import forward_in_place
from quorum_attention.execution.masks import no_bias
from quorum_attention.execution.memory import (
    first_line,
    give_back_cached,
    is_out_of_memory,
)
from quorum_attention.execution.padding import is_filled
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.rows import Axis, GroupBuffer, RowTensor
from quorum_attention.execution.runner import run
from quorum_attention.execution.schedule import Schedule, through_slots
from quorum_attention.execution.slots import SlotLayout, forward_layout
from quorum_attention.execution.sweep import forward_sweep, sweeps
from quorum_attention.execution.tools import Progress, Tools, make_tools
from quorum_attention.execution.workload import count_groups, flat_entries
from quorum_attention.kernels.protocol import Statistics, TaskTensors, WholeCalls


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
        if sweeps(call, schedule):
            failure = None
            try:
                return _sweep(call, schedule, out, out_dtype, report, progress)
            except Exception as error:
                if schedule.pinned or not is_out_of_memory(error):
                    raise
                failure = first_line(error)
            give_back_cached(call.device)
            report.recovery_seconds += time.perf_counter() - started
            report.recoveries.append(f"inputs in place: out of memory ({failure}): through slots")
            schedule = through_slots(schedule, call.work)
        elif runs_directly(call, schedule):
            failure = None
            try:
                return _direct(call, schedule, out, out_dtype, report, progress)
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
        return _through_slots(call, schedule, out, out_dtype, report, progress)
    finally:
        report.seconds = time.perf_counter() - started


def _sweep(
    call: Call,
    schedule: Schedule,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    report: PassReport,
    progress: Progress | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    report.accumulator = "device"
    tools = make_tools(call.device, schedule, timed=report.timed)
    work = forward_in_place if schedule.one_by_one else forward_sweep
    results = work(call, schedule, out, out_dtype, tools, progress)
    report.units += schedule.decomposition.n_tasks * count_groups(call.work, schedule.group)
    report.left_out = 0.0 if schedule.trimmed is None else schedule.trimmed.left_out
    report.stages = tools.clock.seconds()
    return results


def _direct(
    call: Call,
    schedule: Schedule,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    report: PassReport,
    progress: Progress | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    work, kernel = call.work, call.kernel
    assert isinstance(kernel, WholeCalls)
    report.accumulator = "none"
    rows = (*work.batch_shape, work.heads, work.n_queries)
    lse: torch.Tensor | None = None
    parts = list(pieces(call, schedule, (call.query, call.key, call.value)))
    for done, piece in enumerate(parts, start=1):
        part, part_lse = kernel.whole_forward(
            piece.take(call.query, "query"),
            piece.take(call.key, "key"),
            piece.take(call.value, "key"),
            piece.rectangle.causal,
            call.scale,
            piece.bias(piece.rectangle),
            out_dtype,
        )
        report.units += 1
        if piece.whole and out is None:
            out = part.reshape(*rows, work.value_dim).to(out_dtype)
        else:
            out = _or_empty(out, (*rows, work.value_dim), out_dtype, call, "the output")
            piece.put(out, "query", part)
        if piece.whole:
            lse = part_lse.reshape(rows)
        else:
            lse = _or_empty(lse, rows, work.state_dtype, call, "the log-sum-exp")
            piece.put(lse, "query", part_lse)
        # Let go before the next piece's are made: the plan counts one piece's results, not two.
        del part, part_lse
        if progress is not None:
            progress(done, len(parts), "forward")
    assert out is not None
    assert lse is not None
    return out, lse


def _or_empty(
    tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, call: Call, what: str
) -> torch.Tensor:
    return empty_result(shape, dtype, call.query.device, what) if tensor is None else tensor


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
        buffer = accumulator(call, schedule, work.value_dim, home_device, "query")
        home = GroupBuffer(buffer, "query")
    report.accumulator = schedule.accumulator
    lse_rows = RowTensor(lse.unsqueeze(-1), "query")

    def make_pass(schedule: Schedule, tools: Tools) -> Pass:
        layout = forward_layout(work, schedule.group, schedule.task_tokens, out_dtype)

        def compute(unit: Unit) -> None:
            call.kernel.forward(
                gathered(call, schedule, unit, tools),
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
            passed_on=passed_on(layout, {"query": "final_out"}, ("query", "key", "value")),
        )

    host = [call.query, call.key, call.value, out, lse]
    if isinstance(home, GroupBuffer):
        host.append(home.tensor)
    run(make_pass, schedule, call, host, report, progress, backward=False)
    return out, lse


def inputs(call: Call) -> tuple[Input, ...]:
    """Query, key and value, as every pass reads them."""
    return (
        Input("query", RowTensor(call.query, "query")),
        Input("key", RowTensor(call.key, "key")),
        Input("value", RowTensor(call.value, "key")),
    )


def passed_on(
    layout: SlotLayout, overlays: dict[str, str], names: tuple[str, ...]
) -> frozenset[str]:
    """Of the inputs ``names``, those that one slot can take over from another.

    Args:
        overlays: by input, the finished result that may be written over it.
    """
    return frozenset(
        name
        for name in names
        if layout.keeps_inputs(
            name, found if (found := overlays.get(name)) in layout.fields else None
        )
    )


def gathered(call: Call, schedule: Schedule, unit: Unit, tools: Tools) -> TaskTensors:
    """What the inner kernel gets of a unit."""
    work, task = call.work, unit.visit.task
    bias = call.mask.bias(unit.group, task, work.dtype, call.device) if call.mask else no_bias
    # Users' functions are not asked about positions that there are none of.
    filled = is_filled(task, work) and not getattr(call.kernel, "own_attention", False)
    return TaskTensors(
        task=task,
        rectangles=task.rectangles(
            work.is_causal,
            None if filled else work.n_queries,
            None if filled else work.n_keys,
            schedule.max_queries,
            schedule.max_keys,
        ),
        query=unit.fields["query"],
        key=unit.fields["key"],
        value=unit.fields["value"],
        scale=call.scale,
        is_causal=work.is_causal,
        bias=bias,
        max_queries=schedule.max_queries,
        max_keys=schedule.max_keys,
        timed=tools.clock.timed,
        lanes=tools.lanes,
        first_head=unit.group.query_heads.start,
        entries=flat_entries(work, unit.group),
    )


def accumulator(
    call: Call, schedule: Schedule, width: int, home: torch.device, axis: Axis
) -> torch.Tensor:
    """Where the state of one head group waits: (entries, heads, n, width) in the state dtype."""
    work, heads = call.work, schedule.group.kv_heads
    n = work.n_keys
    if axis == "query":
        heads *= work.queries_per_key_head
        n = work.n_queries
    shape = (schedule.group.batch, heads, n, width)
    return travelling_home(shape, work.state_dtype, home, call.device)
