"""The forward pass: statistics of every row, merged over the tasks (paper, Algorithm 1)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from quorum_attention.execution.call import Call, ForwardResults, travelling_home
from quorum_attention.execution.direct import Piece, pieces, runs_directly
from quorum_attention.execution.engine import Input, Pass, State, Unit
from quorum_attention.execution.in_place import forward_in_place
from quorum_attention.execution.masks import no_bias
from quorum_attention.execution.padding import is_filled
from quorum_attention.execution.recovery import AsTheyLie, run_pass
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.rows import Axis, GroupBuffer, RowTensor
from quorum_attention.execution.runner import run
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.slots import forward_layout
from quorum_attention.execution.sweep import forward_sweep, sweeps
from quorum_attention.execution.tools import Progress, Tools, make_tools
from quorum_attention.execution.workload import Group, flat_entries, groups
from quorum_attention.kernels.protocol import Statistics, TaskTensors
from quorum_attention.kernels.traits import traits_of, whole_calls


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
    results = ForwardResults(call, out_dtype, out)
    lying: AsTheyLie | None = None
    if sweeps(call, schedule):
        tools = make_tools(call.device, schedule, timed=report.timed)
        report.accumulator = "device"
        report.left_out = 0.0 if schedule.trimmed is None else schedule.trimmed.left_out
        work = forward_in_place if schedule.one_by_one else forward_sweep
        everything = tuple(groups(call.work, schedule.group))
        lying = AsTheyLie(
            everything,
            work(call, schedule, results, tools, progress),
            schedule.decomposition.n_tasks,
            tools.clock,
        )
    elif runs_directly(call, schedule):
        report.accumulator = "none"
        parts = pieces(call, schedule, (call.query, call.key, call.value))
        lying = AsTheyLie(
            tuple(piece.group for piece in parts),
            _direct(call, parts, results, progress),
            units=1,
        )

    def slots(schedule: Schedule, left: list[Group]) -> None:
        _through_slots(call, schedule, left, results, report, progress)

    try:
        run_pass(call, schedule, report, lying, slots)
    finally:
        report.seconds = time.perf_counter() - started
    return results.made()


def _direct(
    call: Call, parts: Sequence[Piece], results: ForwardResults, progress: Progress | None
) -> Iterator[None]:
    """Fill ``results``, a kernel call at a time."""
    kernel, work = whole_calls(call.kernel), call.work
    assert kernel is not None
    for done, piece in enumerate(parts, start=1):
        part, part_lse = kernel.whole_forward(
            piece.take(call.query, "query"),
            piece.take(call.key, "key"),
            piece.take(call.value, "key"),
            piece.rectangle.causal,
            call.scale,
            piece.bias(piece.rectangle),
            results.out_dtype,
        )
        if piece.whole:
            # The kernel's own, wherever nothing else was given.
            if results.out is None:
                results.out = part.reshape(*results.rows, work.value_dim).to(results.out_dtype)
            else:
                piece.put(results.out, "query", part)
            results.lse = part_lse.reshape(results.rows)
        else:
            out, lse = results.made()
            piece.put(out, "query", part)
            piece.put(lse, "query", part_lse)
        # Let go before the next piece's are made: the plan counts one piece's results, not two.
        del part, part_lse
        if progress is not None:
            progress(done, len(parts), "forward")
        yield


def _through_slots(
    call: Call,
    schedule: Schedule,
    left: list[Group],
    results: ForwardResults,
    report: PassReport,
    progress: Progress | None,
) -> None:
    """Fill ``results`` for the head groups that are ``left``."""
    work = call.work
    state, out_dtype = work.state_dtype, results.out_dtype
    home_device = call.device if schedule.accumulator == "device" else torch.device("cpu")
    out, lse = results.made(home_device)
    final = RowTensor(out, "query")
    home: RowTensor | GroupBuffer = final
    if out_dtype != state:
        buffer = accumulator(call, schedule, work.value_dim, home_device, "query")
        home = GroupBuffer(buffer, "query")
    report.accumulator = schedule.accumulator
    lse_rows = RowTensor(lse.unsqueeze(-1), "query")

    def make_pass(schedule: Schedule, tools: Tools) -> Pass:
        layout = forward_layout(work, schedule.group, schedule.task_rows(work), out_dtype)

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
            passed_on=frozenset(filter(layout.keeps, ("query", "key", "value"))),
        )

    host = [call.query, call.key, call.value, out, lse]
    if isinstance(home, GroupBuffer):
        host.append(home.tensor)
    run(make_pass, schedule, left, call, host, report, progress, backward=False)


def inputs(call: Call) -> tuple[Input, ...]:
    """Query, key and value, as every pass reads them."""
    return (
        Input("query", RowTensor(call.query, "query")),
        Input("key", RowTensor(call.key, "key")),
        Input("value", RowTensor(call.value, "key")),
    )


def gathered(call: Call, schedule: Schedule, unit: Unit, tools: Tools) -> TaskTensors:
    """What the inner kernel gets of a unit."""
    work, task = call.work, unit.visit.task
    bias = call.mask.bias(unit.group, task, work.dtype, call.device) if call.mask else no_bias
    # Users' functions are not asked about positions that there are none of.
    filled = is_filled(task, work) and not traits_of(call.kernel).own_attention
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
