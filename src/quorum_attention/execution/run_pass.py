"""Runs a pass by its route; where memory runs out, the controller says how to
continue."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from quorum_attention.errors import OutOfMemoryError, first_line, is_out_of_memory
from quorum_attention.execution.control.controller import RecoveryController
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.job import PassJob, Progress
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.slot_rows import PassStorage
from quorum_attention.execution.task_levels import TaskLevels


def run_pass(
    job: PassJob,
    schedule: Schedule,
    report: PassReport,
    progress: Progress | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run a pass by its schedule's route, or through slots if that route cannot run it.

    What is done when memory runs out stays done.

    Args:
        report: filled while it runs.
        progress: called with units done, units in all, and the pass's name.

    Returns:
        the results, in the order of the pass's states.

    Raises:
        OutOfMemoryError: the depth is pinned, or nothing is left to try.
    """
    job.report = report
    job.progress = progress
    started = time.perf_counter()
    try:
        _run_with_recovery(job, schedule.as_runnable(job.problem), report)
    finally:
        report.seconds = time.perf_counter() - started
    return job.make_results()


def _run_with_recovery(job: PassJob, schedule: Schedule, report: PassReport) -> None:
    """Run units until all are done; when memory runs out, or there is headroom, as the
    controller says.

    Raises:
        OutOfMemoryError: the controller gives up.
    """
    controller = _controller(job, schedule)
    # The states that wait outside of slots last for all attempts.
    storage: PassStorage | None = None
    with ExitStack() as open_storage:
        while not controller.finished:
            present = _present_schedule(schedule, controller)
            if storage is None:
                storage = open_storage.enter_context(
                    present.route.open_storage(job, present)
                )
            _begin_attempt(job, present, report)
            failure = _attempt(
                job,
                present,
                controller,
                storage,
                report,
            )
            report.add_stages(job.clock.seconds())
            if controller.finished:
                return
            if failure is None:
                controller.headroom()
            else:
                _recover(job, controller, failure)
                report.recovery_seconds += time.perf_counter() - failure.last_done
            report.recoveries.append(controller.history[-1])


@dataclass(frozen=True, slots=True)
class _Failure:
    """Memory ran out.

    Attributes:
        message: the allocator's.
        last_done: when the last unit before it was done.
    """

    message: str
    last_done: float


def _attempt(
    job: PassJob,
    schedule: Schedule,
    controller: RecoveryController,
    storage: PassStorage | None,
    report: PassReport,
) -> _Failure | None:
    """Run units until all are done, headroom is found (None), or memory runs out."""
    controller.start()
    last_done = time.perf_counter()
    try:
        for n_units in schedule.route.run(job, schedule, controller, storage):
            report.units += n_units
            last_done = time.perf_counter()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Only the text leaves: the traceback would hold the failed attempt's tensors.
        return _Failure(first_line(error), last_done)
    return None


def _controller(job: PassJob, schedule: Schedule) -> RecoveryController:
    """The controller of a pass."""
    route = schedule.route
    return RecoveryController(
        route.groups(job, schedule),
        None if route.whole_groups else TaskLevels(schedule, job.problem),
        route.n_cap,
        pinned=schedule.pinned,
        fallback=partial(_cut_whole_groups, schedule, job.problem),
    )


def _cut_whole_groups(
    schedule: Schedule, problem: Problem
) -> tuple[TaskLevels, str, str]:
    """The tasks that head groups which are too large are cut into; what failed, and
    what is done instead, in words."""
    through_slots = schedule.route.fallback(schedule, problem.shape)
    failed, instead = schedule.route.recovery
    return TaskLevels(through_slots, problem), failed, instead


def _present_schedule(schedule: Schedule, controller: RecoveryController) -> Schedule:
    """The schedule of a pass, or tasks through slots at the controller's depth."""
    if controller.groups_are_whole:
        return schedule
    through_slots = controller.levels.schedule(controller.depth)
    return through_slots.changed(n_cap=controller.n_cap)


def _begin_attempt(job: PassJob, schedule: Schedule, report: PassReport) -> None:
    """Note how an attempt runs, and give the job its clock and streams."""
    route = schedule.route
    report.accumulator = route.accumulators
    report.left_out = schedule.trimmed_share
    report.levels = schedule.decomposition.levels
    report.n_cap = route.n_cap
    backend = backend_of(job.device)
    job.clock = backend.clock() if report.timed and route.measured else Clock()
    job.streams = backend.kernel_streams(job.device, route.streams)


def _recover(job: PassJob, controller: RecoveryController, failure: _Failure) -> None:
    """Have the controller decide how to go on.

    Raises:
        OutOfMemoryError: the controller gives up.
    """
    backend_of(job.device).give_back_cached()
    controller.out_of_memory(failure.message)
    if not controller.given_up:
        return
    message = f"{controller.given_up}. The allocator said: {failure.message}"
    earlier = "".join(f"\n  before that: {line}" for line in controller.history)
    raise OutOfMemoryError(message + earlier)
