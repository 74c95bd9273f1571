"""Runs a pass by its route; where memory runs out, the controller says how to continue."""

from __future__ import annotations

import time

import torch

from quorum_attention.errors import OutOfMemoryError, first_line, is_out_of_memory
from quorum_attention.execution.call import Job, Progress, Tools
from quorum_attention.execution.control.controller import RecoveryController
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.schedule import Attempt, Schedule
from quorum_attention.execution.task_levels import TaskLevels


def run_pass(
    job: Job, schedule: Schedule, report: PassReport, progress: Progress | None = None
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
    job.report, job.progress = report, progress
    started = time.perf_counter()
    try:
        if not schedule.runs(job.problem):
            schedule = schedule.through_slots(job.shape)
        controller = _controller(job, schedule)
        while not controller.finished:
            schedule = _continued(schedule, controller)
            route = schedule.route
            with route.opened(job, schedule) as attempt:
                # Whole groups that are too large are cut, and go on by another route.
                while not controller.finished and controller.groups_are_whole == route.whole_groups:
                    _attempt(job, _continued(schedule, controller), controller, attempt)
    finally:
        report.seconds = time.perf_counter() - started
    return job.make_results()


def _controller(job: Job, schedule: Schedule) -> RecoveryController:
    """The controller of a pass."""
    route = schedule.route

    def fallback() -> tuple[TaskLevels, str, str]:
        through_slots = route.fallback(schedule, job.shape)
        failed, instead = route.recovery
        return TaskLevels(through_slots, job.problem), failed, instead

    return RecoveryController(
        route.groups(job, schedule),
        None if route.whole_groups else TaskLevels(schedule, job.problem),
        route.n_cap,
        pinned=schedule.pinned,
        fallback=fallback,
    )


def _continued(schedule: Schedule, controller: RecoveryController) -> Schedule:
    """``schedule``, or tasks through slots at the controller's depth."""
    if controller.groups_are_whole:
        return schedule
    return controller.levels.schedule(controller.depth).changed(n_cap=controller.n_cap)


def _attempt(
    job: Job, schedule: Schedule, controller: RecoveryController, attempt: Attempt
) -> None:
    """Run units until all are done, headroom is found, or memory runs out; then ask the controller.

    Raises:
        OutOfMemoryError: the controller gives up.
    """
    report, route = job.report, schedule.route
    assert report is not None
    backend = backend_of(job.device)
    report.accumulator = route.accumulators
    report.left_out = schedule.trimmed_share
    report.levels = schedule.decomposition.levels
    report.n_cap = route.n_cap
    clock = backend.clock() if report.timed and route.measured else Clock()
    tools = Tools(clock, backend.kernel_streams(job.device, route.streams))
    failure: str | None = None
    controller.start()
    last_done = time.perf_counter()
    try:
        for n_units in attempt(schedule, controller, tools):
            report.units += n_units
            last_done = time.perf_counter()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Only the text leaves: the traceback would hold the failed attempt's tensors.
        failure = first_line(error)
    for stage, seconds in clock.seconds().items():
        report.stages[stage] = report.stages.get(stage, 0.0) + seconds
    if controller.finished:
        return
    if failure is None:
        controller.headroom()
    else:
        backend.give_back_cached()
        controller.out_of_memory(failure)
        if controller.given_up:
            before = "".join(f"\n  before that: {line}" for line in controller.history)
            raise OutOfMemoryError(f"{controller.given_up}. The allocator said: {failure}{before}")
        report.recovery_seconds += time.perf_counter() - last_done
    report.recoveries.append(controller.history[-1])
