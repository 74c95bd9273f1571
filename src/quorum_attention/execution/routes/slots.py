"""The route ``slots``: each task is copied into a slot, computed, and copied out.

It runs every call, on any device, wherever the inputs and results are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.call import Job, Tools
from quorum_attention.execution.control.controller import RecoveryController
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.residency import Residency
from quorum_attention.execution.engine import Engine
from quorum_attention.execution.problem import (
    Bytes,
    GroupSize,
    Problem,
    WorkCounts,
    Workload,
    bytes_before,
    count_groups,
    final_bytes,
    moved_bytes,
    result_bytes,
    state_bytes,
)
from quorum_attention.execution.scaling import UnitScaling
from quorum_attention.execution.schedule import Attempt, Choice, Route, Schedule
from quorum_attention.execution.slot_rows import (
    Input,
    SlotLayout,
    SlotRows,
    State,
    Unit,
    aligned,
    arena_and_mover,
    moved_tensors,
    slot_layout,
)
from quorum_attention.execution.trimming import task_rows
from quorum_attention.quorums import quorum_size


@dataclass(frozen=True, slots=True)
class Slots(Route):
    """One task after the other, through slots carved from one arena."""

    whole_groups = False

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

    def runs(self, schedule: Schedule, case: Problem) -> bool:
        """Always true."""
        return True

    def memory_use(self, schedule: Schedule, case: Problem) -> Bytes:
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

    def work_counts(self, schedule: Schedule, case: Problem) -> WorkCounts:
        """Inputs are copied in at every visit of a row, states in and out."""
        units = count_groups(case.work, schedule.group) * schedule.n_tasks
        inputs, states = moved_bytes(case)
        visits = schedule.visits(case.work)
        up, down = visits * inputs, float(states)
        if self.accumulator == "host":
            # Trimmed tasks may leave out rows altogether, so there may be less than one visit.
            up += max(0.0, visits - 1.0) * states
            down = visits * states
        return WorkCounts(
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

    @contextmanager
    def opened(self, job: Job, schedule: Schedule) -> Iterator[Attempt]:
        """The states that wait outside of slots last for all attempts of a pass."""
        call, home = job.call, Residency.of_home(self.accumulator, job.call.device)
        scalings: list[UnitScaling] = []
        moved = moved_tensors(job, schedule.group, home, made_at=home.device)

        def attempt(
            schedule: Schedule, controller: RecoveryController, tools: Tools
        ) -> Iterator[int]:
            scaling = None
            if job.problem.scaled:
                scaling = UnitScaling(call.work, call.device, controller)
                scalings.append(scaling)
            layout, n_slots = _layout(job, schedule), controller.n_slots
            n_bytes = n_slots * layout.slot_bytes
            headroom = _headroom(job, controller)
            done, total = controller.units_done, controller.units_done + controller.units_left
            with arena_and_mover(job, n_bytes, n_slots, locks, tools.clock) as (arena, mover):
                rows = _rows(job, layout, inputs, states, layout.slots(arena, n_slots), mover)
                engine = Engine(job, tools, mover, schedule.limits, rows, scaling)
                for unit in engine.run(_units(rows, controller, headroom)):
                    controller.done(unit.group, unit.visit.task.path)
                    done += 1
                    job.tell(done, total)
                    yield 1

        with moved as (inputs, states, locks):
            try:
                yield attempt
            finally:
                job.repeated(sum(scaling.repeated for scaling in scalings))


def _layout(job: Job, schedule: Schedule) -> SlotLayout:
    work, dtype = job.call.work, job.problem.place.result_dtype
    rows = schedule.task_rows(work)
    return slot_layout(job.spec, work, schedule.group, rows, dtype, scaled=job.problem.scaled)


def _rows(
    job: Job,
    layout: SlotLayout,
    inputs: tuple[Input, ...],
    states: tuple[State, ...],
    slots: dict[int, torch.Tensor],
    mover: Mover,
) -> SlotRows:
    divided = job.spec.divided if job.problem.scaled else None
    passed_on = frozenset(
        i.name for i in job.spec.inputs if i.name != divided and layout.keeps(i.name)
    )
    factor = job.factor if job.problem.place.is_divided else None
    return SlotRows(job.call.work, layout, inputs, states, slots, mover, passed_on, factor)


def _headroom(job: Job, controller: RecoveryController) -> Callable[[], bool]:
    """A function that says whether the slots of one level less fit twice into free memory."""
    if not controller.may_coarsen:
        return lambda: False
    coarser = _layout(job, controller.cuts.schedule(controller.depth - 1))
    needed, device = 2 * controller.n_cap * coarser.slot_bytes, job.call.device
    return lambda: backend_of(device).free_bytes(device) >= needed


def _units(
    rows: SlotRows, controller: RecoveryController, headroom: Callable[[], bool]
) -> Iterator[Unit]:
    """The controller's units, in slots in turn. Ends early, between two groups, if there is
    headroom."""
    n_slots, previous = len(rows.slots), None
    for number in count():
        if controller.between_groups and headroom():
            return
        launch = controller.next()
        if launch is None:
            return
        group, visit, slot = launch.group, launch.visit, number % n_slots
        before = None
        if previous is not None and previous.group == group and visit.carried:
            before = (previous.slot, previous.fields)
        # With two slots or more, rows of the unit just before are carried, not loaded. All other
        # rows were last stored by the unit before that one, or earlier.
        after = (slot - min(2, n_slots)) % n_slots
        previous = Unit(group, visit, slot, rows.fields(slot, group, visit), after, before)
        yield previous
