"""Task by task through slots: copied in, computed, copied out; whatever lies wherever."""

from __future__ import annotations

import torch

from quorum_attention.execution.device.residency import Residency
from quorum_attention.execution.engine import Input, Pass, State, Unit
from quorum_attention.execution.job import Job
from quorum_attention.execution.padding import is_filled
from quorum_attention.execution.pass_spec import RowSpec, StateSpec
from quorum_attention.execution.rows import GroupBuffer, RowTensor
from quorum_attention.execution.runner import run
from quorum_attention.execution.scaling import BackwardScaling
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.slots import slot_layout
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.workload import Group
from quorum_attention.kernels.protocol import TaskTensors
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.traits import traits_of


def through_slots(job: Job, schedule: Schedule, left: list[Group]) -> None:
    """Make the results of the head groups ``left``."""
    call, spec = job.call, job.spec
    assert job.report is not None, "what goes through slots has been planned"
    home = Residency.of_home(schedule.accumulator, call.device)
    results = job.results.make(home.device)
    final = [
        RowTensor(_with_columns(result, state), state.axis)
        for state, result in zip(spec.states, results, strict=True)
    ]
    homes = [
        rows
        if job.results.dtype_of(state) == call.work.state_dtype
        else GroupBuffer(_accumulator(job, schedule, state, home), state.axis)
        for state, rows in zip(spec.states, final, strict=True)
    ]
    inputs = tuple(
        Input(item.name, RowTensor(_with_columns(job.tensors[item.name], item), item.axis))
        for item in spec.inputs
    )
    job.report.accumulator = schedule.accumulator
    scalings: list[BackwardScaling] = []

    def make_pass(schedule: Schedule, tools: Tools) -> Pass:
        scaling = BackwardScaling(call.work, call.device) if job.scaled else None
        if scaling is not None:
            scalings.append(scaling)
        return _make_pass(job, schedule, tools, inputs, homes, final, scaling)

    moved = [*job.tensors.values(), *results]
    moved.extend(kept.tensor for kept in homes if isinstance(kept, GroupBuffer))
    try:
        run(job, schedule, left, make_pass, moved)
    finally:
        job.repeated(sum(scaling.repeated for scaling in scalings))


def _make_pass(
    job: Job,
    schedule: Schedule,
    tools: Tools,
    inputs: tuple[Input, ...],
    homes: list[RowTensor | GroupBuffer],
    final: list[RowTensor],
    scaling: BackwardScaling | None,
) -> Pass:
    spec, work, results = job.spec, job.call.work, job.results
    rows = schedule.task_rows(work)
    layout = slot_layout(spec, work, schedule.group, rows, results.dtype, scaled=job.scaled)
    fields = [(f"state_{state.name}", state.width == "one") for state in spec.states]

    def compute(unit: Unit) -> None:
        given = {item.name: unit.fields[item.name] for item in spec.inputs[3:]}
        if "lse" in given:
            given["lse"] = given["lse"].squeeze(-1)
        states = [unit.fields[n].squeeze(-1) if one else unit.fields[n] for n, one in fields]
        told = Scaling() if scaling is None else scaling.scaling(unit)
        task = _gathered(job, schedule, unit, tools)
        spec.accumulate(job.call.kernel, task, given, states, told)
        if scaling is not None:
            scaling.computed(unit)

    states = tuple(
        State(
            f"state_{state.name}",
            state.fill,
            home,
            rows_of_result,
            f"final_{state.name}" if f"final_{state.name}" in layout.fields else None,
        )
        for state, home, rows_of_result in zip(spec.states, homes, final, strict=True)
    )
    divided = spec.divided if job.scaled else None
    return Pass(
        work,
        layout,
        inputs,
        states,
        compute,
        prepare=None if scaling is None else scaling.prepare,
        spoiled=None if scaling is None else scaling.spoiled,
        mended=None if scaling is None else scaling.mended,
        factor=job.factor if job.divided else None,
        passed_on=frozenset(
            item.name for item in spec.inputs if item.name != divided and layout.keeps(item.name)
        ),
    )


def _gathered(job: Job, schedule: Schedule, unit: Unit, tools: Tools) -> TaskTensors:
    """What the inner kernel gets of a unit."""
    call, work, task = job.call, job.call.work, unit.visit.task
    # Users' functions are not asked about positions that there are none of.
    filled = is_filled(task, work) and not traits_of(call.kernel).own_attention
    rectangles = task.rectangles(
        work.is_causal,
        None if filled else work.n_queries,
        None if filled else work.n_keys,
        schedule.max_queries,
        schedule.max_keys,
    )
    three = (unit.fields["query"], unit.fields["key"], unit.fields["value"])
    return job.task(schedule, unit.group, tools, task, rectangles, three)


def _with_columns(tensor: torch.Tensor, rows: RowSpec) -> torch.Tensor:
    """(*batch, heads, rows, width), also of one number a row."""
    return tensor.unsqueeze(-1) if rows.width == "one" else tensor


def _accumulator(job: Job, schedule: Schedule, state: StateSpec, home: Residency) -> torch.Tensor:
    """Where the state of one head group waits: (entries, heads, n, width) in the state dtype."""
    work, group = job.call.work, schedule.group
    shape = (
        group.batch, state.heads(work, group.kv_heads), state.rows(work), state.columns(work),
    )  # fmt: skip
    return home.travelling(shape, work.state_dtype, job.call.device)
