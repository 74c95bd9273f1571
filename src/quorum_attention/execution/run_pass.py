"""Runs a pass by its route; if memory runs out, the machine says how to continue through slots."""

from __future__ import annotations

import time

import torch

from quorum_attention.execution.control.events import GiveUp, OutOfMemory, PlanAnew
from quorum_attention.execution.control.machine import HERE, Fallback, Limits, Machine
from quorum_attention.execution.device.clock import NoClock
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.job import Job, ProgressStoppedError, Tools
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.execution.schedule import Cutting, Schedule


def run_pass(
    job: Job, schedule: Schedule, *, guessed: bool = False
) -> tuple[torch.Tensor, ...] | None:
    """Run a pass by its schedule's route, or through slots if that route cannot run it.

    Head groups that are done when memory runs out stay done.

    Args:
        guessed: whether the schedule was made without asking how much memory is free.

    Returns:
        the results, in the order of the pass's states; None if the machine wants a guessed pass
        planned anew.

    Raises:
        OutOfMemoryError, ours or torch's: the depth is pinned, or nothing is left to try.
    """
    report = job.report
    assert report is not None
    started = time.perf_counter()
    try:
        if not schedule.runs(job.case):
            schedule = schedule.through_slots(job.call.work)
        machine = _machine(job, schedule, guessed)
        while not machine.finished:
            _attempt(job, schedule, machine)
            if isinstance(machine.end, PlanAnew):
                return None
            if not machine.finished:
                schedule = machine.queue.cuts.schedule(machine.limits.depth)
    except ProgressStoppedError as stopped:
        raise stopped.error from None
    finally:
        report.seconds = time.perf_counter() - started
    return job.results.make()


def _machine(job: Job, schedule: Schedule, guessed: bool) -> Machine:
    """The machine of a pass on one device."""
    work, kernel, backward = job.call.work, job.call.kernel, job.spec.backward

    def cut(schedule: Schedule) -> tuple[Cutting, Limits]:
        cutting = Cutting(schedule, work, kernel, backward=backward)
        depth = schedule.decomposition.depth
        return cutting, Limits(depth, cutting.deepest, schedule.pinned)

    def instead() -> Fallback:
        found = schedule.route.fallback(schedule, work)
        assert found is not None, "whole groups can be cut"
        return Fallback(*cut(found), found.n_cap, *schedule.route.recovery)

    groups, n_caps = schedule.route.groups(job, schedule), {HERE: schedule.n_cap}
    if schedule.route.whole_groups:
        depth = schedule.decomposition.depth
        limits = Limits(depth, depth, schedule.pinned, guessed)
        return Machine(groups, instead, limits, n_caps)
    return Machine(groups, *cut(schedule), n_caps)


def _attempt(job: Job, schedule: Schedule, machine: Machine) -> None:
    """Run the units that the machine has left by the schedule's route. If memory runs out for whole
    groups, the machine cuts them, and another attempt runs what is left.

    Raises:
        OutOfMemoryError, ours or torch's: the machine gives up.
    """
    report, device, route = job.report, job.call.device, schedule.route
    assert report is not None
    backend = backend_of(device)
    report.accumulator, report.left_out = route.accumulators, schedule.left_out
    clock = backend.clock() if report.timed and route.measured else NoClock()
    tools = Tools(clock, backend.lanes(device, schedule.streams))
    machine.start(HERE)
    began = time.perf_counter()
    try:
        for units in route.run(job, schedule, machine, tools):
            report.units += units
            began = time.perf_counter()
    except Exception as error:
        # Through slots, the runner has already tried every recovery.
        if not (route.whole_groups and is_out_of_memory(error)):
            raise
        # Only the text leaves: the traceback would hold the failed attempt's tensors.
        if isinstance(machine.on(OutOfMemory(HERE, first_line(error))), GiveUp):
            raise
        report.recoveries.append(machine.history[-1])
    for stage, seconds in clock.seconds().items():
        report.stages[stage] = report.stages.get(stage, 0.0) + seconds
    if not machine.finished:
        # The failed attempt's tensors are free by now.
        backend.give_back_cached()
        report.recovery_seconds += time.perf_counter() - began
