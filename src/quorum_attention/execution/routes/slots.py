"""The route ``slots``: each task is copied into a slot, computed, and copied out.

It runs every call, on any device, wherever the inputs and results are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.case import Case
from quorum_attention.execution.control.machine import Machine
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.residency import Home, Residency
from quorum_attention.execution.engine import Input, SlotPass, State, Unit
from quorum_attention.execution.job import Job
from quorum_attention.execution.padding import is_filled, task_rows
from quorum_attention.execution.pass_spec import RowSpec, StateSpec
from quorum_attention.execution.routes.choice import Choice
from quorum_attention.execution.rows import GroupBuffer, RowTensor
from quorum_attention.execution.runner import run
from quorum_attention.execution.scaling import BackwardScaling
from quorum_attention.execution.schedule import Route, Schedule
from quorum_attention.execution.slots import aligned, slot_layout
from quorum_attention.execution.takes import (
    Bytes,
    Load,
    bytes_before,
    final_bytes,
    moved_bytes,
    result_bytes,
    state_bytes,
)
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.trimming import Tally
from quorum_attention.execution.workload import GroupSize, Workload, count_groups
from quorum_attention.kernels.protocol import TaskTensors
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.quorums import quorum_size


@dataclass(frozen=True, slots=True)
class Slots(Route):
    """One task after the other, through slots carved from one arena.

    Attributes:
        n_cap: slots, i.e. tasks resident at once.
        accumulator: where the travelling state lives between visits.
        streams: kernel calls of a task in flight at once.
        trimmed: sizes of the trimmed tasks; None: they are not trimmed, or it is not known.

    Raises:
        ValueError: a field has a value that is not allowed.
    """

    n_cap: int = 1
    accumulator: Home = "device"
    streams: int = 1
    trimmed: Tally | None = None

    whole_groups = False

    def __post_init__(self) -> None:
        if self.n_cap < 1 or self.streams < 1:
            raise ValueError(
                f"n_cap and streams must be at least 1, got {self.n_cap} and {self.streams}"
            )
        if self.accumulator not in ("device", "host"):
            raise ValueError(f"accumulator must be 'device' or 'host', got {self.accumulator!r}")

    @property
    def words(self) -> str:
        """A description of the route for people."""
        return f"through slots, accumulators: {self.accumulator}"

    @classmethod
    def offered(cls, choice: Choice) -> Iterator[Slots]:
        """Those that a search tries: every combination."""
        for n_cap, home, streams in product(choice.n_caps, choice.homes, choice.streams):
            yield cls(n_cap, home, streams, choice.trimmed)

    def check(self, shape: Decomposition, group: GroupSize) -> None:
        """Every decomposition and every head group will do."""

    def task_rows(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """Rows of the largest task: a trimmed one, or one that padding fills up."""
        if self.trimmed is None:
            return task_rows(shape, work)
        return min(self.trimmed.largest, work.n_queries), min(self.trimmed.largest, work.n_keys)

    def limits(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """A monolithic task is one rectangle. Any other task is halved at chunks, so that no side
        of a rectangle has more than half its chunks, rounded up."""
        if shape.depth == 0:
            return work.n_queries, work.n_keys
        # Half of an odd number of chunks is rounded up.
        chunks = quorum_size(shape.levels[-1])
        half = -(-max(task_rows(shape, work)) * -(-chunks // 2) // chunks)
        unit = shape.tile if shape.layout == "aligned" else 1
        half = -(-half // unit) * unit
        queries, keys = self.task_rows(shape, work)
        return min(half, queries), min(half, keys)

    def runs(self, schedule: Schedule, case: Case) -> bool:
        """Always true."""
        return True

    def takes(self, schedule: Schedule, case: Case) -> Bytes:
        """The arena, workspace, results, and the accumulators if the budget counts them."""
        work, place, group = case.work, case.place, schedule.group
        rows = schedule.task_rows(work)
        layout = slot_layout(case.spec, work, group, rows, place.result_dtype, scaled=case.scaled)
        homes: tuple[int, ...] = ()
        if place.counts(self.accumulator):
            homes = tuple(map(aligned, final_bytes(case)))
            if place.result_dtype != work.state_dtype:
                homes += state_bytes(case, group)
        return Bytes(
            self.streams * case.workspace(schedule.extent(work)),
            self.n_cap * layout.slot_bytes,
            homes,
            (*bytes_before(case), *result_bytes(case)),
        )

    def load(self, schedule: Schedule, case: Case) -> Load:
        """Inputs are copied in at every visit of a row, states in and out."""
        units = count_groups(case.work, schedule.group) * schedule.n_tasks
        inputs, states = moved_bytes(case)
        visits = schedule.visits(case.work)
        up, down = visits * inputs, float(states)
        if self.accumulator == "host":
            # Trimmed tasks may leave out rows altogether, so there may be less than one visit.
            up += max(0.0, visits - 1.0) * states
            down = visits * states
        return Load(
            units=units,
            up=up,
            down=down,
            resident=case.place.resident,
            hidden_by=max(1, units) if self.n_cap > 1 else 1,
            set_up=units,
            run_copies=len(case.spec.inputs) + 2 * len(case.spec.states),
            passes=1,
            even=schedule.decomposition.depth < 2,
        )

    def slots(self, **changes: Any) -> Slots:
        """The same route with other values of some fields."""
        return replace(self, **changes) if changes else self

    def fallback(self, schedule: Schedule, work: Workload) -> None:
        """There is none: where memory runs out, the machine takes fewer slots or cuts tasks."""
        return

    def run(self, job: Job, schedule: Schedule, machine: Machine, tools: Tools) -> Iterator[int]:
        """Compute all that the machine has left. Yields nothing: the runner counts the units."""
        call, spec = job.call, job.spec
        home = Residency.of_home(self.accumulator, call.device)
        given = {id(result) for result in job.results.tensors.values()}
        results = job.results.make(home.device)
        final = [
            RowTensor(with_columns(result, state), state.axis)
            for state, result in zip(spec.states, results, strict=True)
        ]
        homes = [
            rows
            if job.results.dtype_of(state) == call.work.state_dtype
            else GroupBuffer(accumulator(job, schedule, state, home), state.axis)
            for state, rows in zip(spec.states, final, strict=True)
        ]
        inputs = tuple(
            Input(
                item.name,
                RowTensor(with_columns(job.tensors[item.name], item), item.axis),
                item.of_scores,
            )
            for item in spec.inputs
        )
        scalings: list[BackwardScaling] = []

        def make_pass(schedule: Schedule, tools: Tools) -> SlotPass:
            scaling = None
            if job.scaled:
                scaling = BackwardScaling(call.work, call.device, machine)
                scalings.append(scaling)
            return _make_pass(job, schedule, tools, inputs, homes, final, scaling)

        read = [item.rows.tensor for item in inputs]
        as_they_are = [
            tensor
            for tensor, item in zip(read, spec.inputs, strict=True)
            if tensor.dtype == item.dtype(call.work)
        ]
        moved = [*read, *results]
        moved.extend(rows.tensor for rows in homes if isinstance(rows, GroupBuffer))
        made = [result for result in results if id(result) not in given]
        there = [result for result in results if id(result) in given]
        backend = backend_of(call.device)
        try:
            with backend.page_locks(moved, made, as_they_are, there, read) as locks:
                run(job, machine, make_pass, locks, tools)
        finally:
            job.repeated(sum(scaling.repeated for scaling in scalings))
        return iter(())


def _make_pass(
    job: Job,
    schedule: Schedule,
    tools: Tools,
    inputs: tuple[Input, ...],
    homes: list[RowTensor | GroupBuffer],
    final: list[RowTensor],
    scaling: BackwardScaling | None,
) -> SlotPass:
    """The pass of ``job``, for the engine.

    Args:
        homes: for each state, where it waits between visits.
        final: for each state, the result that it ends in.
        scaling: of a scaled backward, else None.
    """
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
            partial(job.fill, state),
            home,
            rows_of_result,
            f"final_{state.name}" if f"final_{state.name}" in layout.fields else None,
        )
        for state, home, rows_of_result in zip(spec.states, homes, final, strict=True)
    )
    divided = spec.divided if job.scaled else None
    return SlotPass(
        work,
        layout,
        inputs,
        states,
        compute,
        prepare=None if scaling is None else scaling.prepare,
        spoiled=None if scaling is None else scaling.spoiled,
        repeats=None if scaling is None else scaling.repeats,
        factor=job.factor if job.is_divided else None,
        passed_on=frozenset(
            item.name for item in spec.inputs if item.name != divided and layout.keeps(item.name)
        ),
    )


def _gathered(job: Job, schedule: Schedule, unit: Unit, tools: Tools) -> TaskTensors:
    """What the inner kernel gets for a unit: the tensors in its slot, and its rectangles."""
    call, work, task = job.call, job.call.work, unit.visit.task
    # A kernel with its own attention may call a user's function with positions, so it must not get
    # the padding beyond the last token.
    filled = is_filled(task, work) and not call.kernel.own_attention
    rectangles = task.rectangles(
        work.is_causal,
        None if filled else work.n_queries,
        None if filled else work.n_keys,
        schedule.max_queries,
        schedule.max_keys,
    )
    three = (unit.fields["query"], unit.fields["key"], unit.fields["value"])
    return job.task(schedule.limits, unit.group, tools, task, rectangles, three)


def with_columns(tensor: torch.Tensor, rows: RowSpec) -> torch.Tensor:
    """``tensor`` as (*batch, heads, rows, width); the width is 1 for one number a row."""
    return tensor.unsqueeze(-1) if rows.width == "one" else tensor


def accumulator(job: Job, schedule: Schedule, state: StateSpec, home: Residency) -> torch.Tensor:
    """Memory in which the state of one head group waits between visits: (entries, heads, n, width)
    in the state dtype."""
    work, group = job.call.work, schedule.group
    shape = (
        group.batch, state.heads(work, group.kv_heads), state.rows(work), state.columns(work),
    )  # fmt: skip
    return home.travelling(shape, work.state_dtype, job.call.device)
