"""Runs a pass by its route, and by another what memory left of it."""

from __future__ import annotations

import time

import torch

from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.job import Job
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.tools import make_tools
from quorum_attention.execution.workload import Group


def run_pass(job: Job, schedule: Schedule) -> tuple[torch.Tensor, ...]:
    """The results of a pass: by its route where that can be, else through slots.

    Head groups that are done when memory runs out stay done: their results are where they belong.

    Raises:
        OutOfMemoryError, and torch's own: the schedule is pinned, or nothing is left to try.
    """
    call, report = job.call, job.report
    assert report is not None
    started = time.perf_counter()
    try:
        if not schedule.runs(call.work, call.kernel, job.spec, job):
            schedule = schedule.through_slots(call.work)
        left = schedule.route.groups(job, schedule)
        following = _attempt(job, schedule, left)
        while following is not None:
            following = _attempt(job, following, left)
    finally:
        report.seconds = time.perf_counter() - started
    return job.results.make()


def _attempt(job: Job, schedule: Schedule, left: list[Group]) -> Schedule | None:
    """Run the head groups ``left``; what to go on with where memory runs out, or None."""
    report, device, every = job.report, job.call.device, len(left)
    assert report is not None
    route = schedule.route
    report.accumulator, report.left_out = route.accumulators, schedule.left_out
    tools = make_tools(device, schedule.streams, timed=report.timed and route.measured)
    began = time.perf_counter()
    failure, following = None, None
    try:
        for units in route.run(job, schedule, left, tools):
            left.pop(0)
            report.units += units
            began = time.perf_counter()
    except Exception as error:
        if schedule.pinned or not is_out_of_memory(error):
            raise
        following = route.fallback(schedule, job.call.work)
        if following is None:
            raise
        # Only the text is kept: the traceback holds the failed attempt's tensors.
        failure = first_line(error)
    for stage, seconds in tools.clock.seconds().items():
        report.stages[stage] = report.stages.get(stage, 0.0) + seconds
    if failure is None or following is None:
        return None
    # Its frame is gone, and what it held.
    backend_of(device).give_back_cached()
    report.recovery_seconds += time.perf_counter() - began
    done = every - len(left)
    kept = f", {done} of {every} head groups done" if done else ""
    report.recoveries.append(f"{following.failed} ({failure}{kept}): {following.instead}")
    return following.schedule
