"""The route of tasks: each is copied into a slot, computed, and copied out.

It runs every call, on any device, wherever inputs and results are. All slots are carved
from one arena.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from quorum_attention.arithmetic import ceil_div, round_up
from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.control.controller import RecoveryController
from quorum_attention.execution.device.allocate import home_device
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.engine import Engine
from quorum_attention.execution.footprint import (
    Footprint,
    home_bytes,
    moved_bytes,
    result_bytes,
)
from quorum_attention.execution.head_groups import Axis, GroupSize, count_groups
from quorum_attention.execution.job import PassJob
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.scaling import BackwardScaling
from quorum_attention.execution.schedule import Route, Schedule, cut_unit
from quorum_attention.execution.slot_layout import SlotLayout, slot_layout
from quorum_attention.execution.slot_rows import (
    PassStorage,
    SlotRows,
    Unit,
    open_pass_storage,
    open_slots,
)
from quorum_attention.execution.work_counts import WorkCounts
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.quorums import quorum_size


@dataclass(frozen=True, slots=True)
class Slots(Route):
    """One task after the other, through slots carved from one arena."""

    whole_groups = False

    @property
    def words(self) -> str:
        """A description of the route for people."""
        return f"through slots, accumulators: {self.accumulator}"

    def task_rows(
        self, decomposition: Decomposition, shape: CallShape
    ) -> tuple[int, int]:
        """Rows of the largest task."""
        tokens = (
            decomposition.max_task_tokens
            if self.trimmed is None
            else self.trimmed.largest
        )
        return min(tokens, shape.n_queries), min(tokens, shape.n_keys)

    def limits(self, decomposition: Decomposition, shape: CallShape) -> tuple[int, int]:
        """A monolithic task is one rectangle. Any other task is halved at chunks, so
        that no side of a rectangle has more than half its chunks, rounded up."""
        if decomposition.depth == 0:
            return shape.n_queries, shape.n_keys
        # Half of an odd number of chunks is rounded up.
        n_chunks = quorum_size(decomposition.levels[-1])
        n_half = ceil_div(n_chunks, 2)
        half = ceil_div(decomposition.max_task_tokens * n_half, n_chunks)
        half = round_up(half, cut_unit(decomposition))
        n_queries, n_keys = self.task_rows(decomposition, shape)
        return min(half, n_queries), min(half, n_keys)

    def runs(self, schedule: Schedule, problem: Problem) -> bool:
        """Always true."""
        return True

    def memory_use(self, schedule: Schedule, problem: Problem) -> Footprint:
        """The arena, workspace, results, and the accumulators if the budget counts
        them."""
        group = schedule.group
        accumulators = home_bytes(problem, group, self.accumulator)
        if problem.scaled:
            # Each slot has a factor and a flag for each key/value head
            # (execution/scaling.py).
            head_bytes = 4 * group.batch * group.kv_heads
            accumulators += (head_bytes,) * (2 * self.n_cap)
        return Footprint(
            problem.shape.device_type,
            workspace=self.streams * problem.workspace(schedule.extent(problem.shape)),
            slots=layout_of(schedule, problem).bytes_of(self.n_cap),
            accumulators=accumulators,
            results=(problem.place.rescaled_grad_bytes or 0, *result_bytes(problem)),
        )

    def work_counts(self, schedule: Schedule, problem: Problem) -> WorkCounts:
        """Inputs are copied in at every visit of a row, states in and out."""
        n_units = count_groups(problem.shape, schedule.group) * schedule.n_tasks
        input_bytes, state_bytes = moved_bytes(problem)
        n_visits = schedule.visits(problem.shape)
        up = n_visits * input_bytes
        down = float(state_bytes)
        if self.accumulator == "host":
            # Trimmed tasks may leave out rows altogether, so there may be less than one
            # visit.
            up += max(0.0, n_visits - 1.0) * state_bytes
            down = n_visits * state_bytes
        # The states of an uncut unit begin empty: they are only copied out.
        n_state_copies = 2 if schedule.decomposition.depth else 1
        run_copies = len(problem.spec.inputs)
        run_copies += n_state_copies * len(problem.spec.states)
        return WorkCounts(
            units=n_units,
            up=up,
            down=down,
            resident=problem.place.resident,
            overlapping_units=max(1, n_units) if self.n_cap > 1 else 1,
            in_slots=True,
            run_copies=run_copies,
            uniform_units=schedule.decomposition.depth < 2,
        )

    def slots(self, **changes: Any) -> Slots:
        """The same route with other values of some fields."""
        return replace(self, **changes) if changes else self

    def open_storage(
        self, job: PassJob, schedule: Schedule
    ) -> AbstractContextManager[PassStorage]:
        """Open the tensors outside of slots: the states that wait there last for all
        attempts."""
        home = home_device(self.accumulator, job.device)
        return open_pass_storage(job, schedule.group, home, result_device=home)

    def run(
        self,
        job: PassJob,
        schedule: Schedule,
        controller: RecoveryController,
        storage: PassStorage | None,
    ) -> Iterator[int]:
        """Run the units that the controller has left. Yields 1 each time that one is
        done."""
        assert storage is not None
        n_slots = controller.n_slots
        scaling = scaling_of(job, schedule.group, n_slots, by_unit=True)
        n_done = controller.units_done
        n_units = controller.units_done + controller.units_left
        layout = layout_of(schedule, job.problem)
        with open_slots(job, storage, (layout, n_slots)) as (rows,):
            engine = Engine(
                job,
                schedule.limits,
                rows,
                scaling,
            )
            units = _units(job, rows, controller)
            for unit in engine.run(units):
                controller.done(unit.group, unit.visit.task.path)
                if unit.group not in controller.begun:
                    job.report_stored(unit.group, rows.mover)
                n_done += 1
                job.report_progress(n_done, n_units)
                yield 1


def scaling_of(
    job: PassJob, group: GroupSize, n_slots: int, *, by_unit: bool
) -> BackwardScaling | None:
    """The scaling of units in ``n_slots`` slots; None: the pass is not scaled."""
    if not job.problem.scaled:
        return None
    heads = (group.batch, group.kv_heads)
    return BackwardScaling(job.shape, job.device, heads, n_slots, by_unit=by_unit)


def layout_of(
    schedule: Schedule,
    problem: Problem,
    axis: Axis | None = None,
    *,
    ends_in_slot: bool = False,
) -> SlotLayout:
    """The memory of a task, or of its rows of one side.

    Args:
        ends_in_slot: whether states begin and end while their rows are in a slot, as
            those of an uncut unit do.
    """
    rows = schedule.task_rows(problem.shape)
    result_dtype = problem.place.result_dtype
    is_narrower = result_dtype != problem.shape.state_dtype
    is_uncut = schedule.decomposition.depth == 0 and axis is None
    # A scaled unit may be computed again after the next one.
    is_final = is_uncut and not problem.scaled
    return slot_layout(
        problem.spec,
        problem.shape,
        schedule.group,
        rows,
        result_dtype,
        axis=axis,
        common_states=is_narrower and (is_final or ends_in_slot),
    )


def _has_headroom(job: PassJob, controller: RecoveryController) -> bool:
    """Whether the slots of one level less fit twice into free memory."""
    coarser_schedule = controller.levels.schedule(controller.depth - 1)
    coarser = layout_of(coarser_schedule, job.problem)
    slot_bytes = coarser.bytes_of(controller.n_cap)
    backend = backend_of(job.device)
    return backend.free_bytes(job.device) >= 2 * slot_bytes


def _units(
    job: PassJob, rows: SlotRows, controller: RecoveryController
) -> Iterator[Unit]:
    """The controller's units, in slots in turn. Ends early, between two groups, if
    there is headroom."""
    n_slots = len(rows.slots)
    before: Unit | None = None
    for number in count():
        if (
            controller.between_groups
            and controller.may_coarsen
            and _has_headroom(job, controller)
        ):
            return
        group_and_visit = controller.next()
        if group_and_visit is None:
            return
        group, visit = group_and_visit
        previous = None
        if before is not None and before.group == group and visit.carried:
            previous = (before.slot, before.fields)
        slot = number % n_slots
        # With two slots or more, rows of the unit just before are carried, not loaded.
        # All other rows were last stored by the unit before that one, or earlier.
        after = (slot - min(2, n_slots)) % n_slots
        unit = Unit(
            group,
            visit,
            slot,
            rows.fields(slot, group, visit),
            after,
            previous,
        )
        yield unit
        before = unit
