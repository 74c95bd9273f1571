"""The route ``slots``: each task is copied into a slot, computed, and copied out.

It runs every call, on any device, wherever the inputs and results are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.case import (
    Bytes,
    Case,
    Load,
    bytes_before,
    final_bytes,
    moved_bytes,
    result_bytes,
    state_bytes,
)
from quorum_attention.execution.control.machine import Machine
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.residency import Home, Residency
from quorum_attention.execution.engine import SlotPass, run
from quorum_attention.execution.job import Job, Tools
from quorum_attention.execution.scaling import BackwardScaling
from quorum_attention.execution.schedule import Choice, Route, Schedule
from quorum_attention.execution.slot_rows import (
    Input,
    SlotRows,
    State,
    Unit,
    accumulate,
    aligned,
    moved_tensors,
    slot_layout,
)
from quorum_attention.execution.trimming import Tally, is_filled, task_rows
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
        call = job.call
        home = Residency.of_home(self.accumulator, call.device)
        scalings: list[BackwardScaling] = []
        moved = moved_tensors(job, schedule.group, home, made_at=home.device)
        with moved as (inputs, states, locks):

            def make_pass(schedule: Schedule, tools: Tools) -> SlotPass:
                scaling = None
                if job.scaled:
                    scaling = BackwardScaling(call.work, call.device, machine)
                    scalings.append(scaling)
                return _make_pass(job, schedule, tools, inputs, states, scaling)

            try:
                run(job, machine, make_pass, locks, tools)
            finally:
                job.repeated(sum(scaling.repeated for scaling in scalings))
        return iter(())


def _make_pass(
    job: Job,
    schedule: Schedule,
    tools: Tools,
    inputs: tuple[Input, ...],
    states: tuple[State, ...],
    scaling: BackwardScaling | None,
) -> SlotPass:
    """The pass of ``job``, for the engine; ``scaling``: of a scaled backward, else None."""
    spec, work, results = job.spec, job.call.work, job.results
    rows = schedule.task_rows(work)
    layout = slot_layout(spec, work, schedule.group, rows, results.dtype, scaled=job.scaled)
    divided = spec.divided if job.scaled else None
    passed_on = frozenset(
        item.name for item in spec.inputs if item.name != divided and layout.keeps(item.name)
    )
    factor = job.factor if job.is_divided else None

    def rows_of(slots: dict[int, torch.Tensor], mover: Mover) -> SlotRows:
        return SlotRows(work, layout, inputs, states, slots, mover, passed_on, factor)

    def compute(unit: Unit) -> None:
        told = Scaling() if scaling is None else scaling.scaling(unit)
        accumulate(job, _gathered(job, schedule, unit, tools), unit.fields, told)
        if scaling is not None:
            scaling.computed(unit)

    if scaling is None:
        return SlotPass(layout, rows_of, compute)
    return SlotPass(layout, rows_of, compute, scaling.prepare, scaling.spoiled, scaling.repeats)


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
