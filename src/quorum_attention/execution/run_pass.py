"""Runs a pass by its route, and by another what memory left of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from quorum_attention.execution.device.clock import NoClock
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.job import Job
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.execution.routes.in_place import in_place, takes_tasks
from quorum_attention.execution.routes.slots import through_slots
from quorum_attention.execution.routes.together import together
from quorum_attention.execution.routes.whole import groups_of, runs_directly, whole
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.schedule import through_slots as slots_instead
from quorum_attention.execution.tools import Tools, make_tools
from quorum_attention.execution.workload import Group, groups

_Run = Callable[[Job, Schedule, Sequence[Group], Tools], Iterator[int]]


def run_pass(job: Job, schedule: Schedule) -> tuple[torch.Tensor, ...]:
    """The results of a pass: on the inputs as they lie, where that can be, else through slots.

    Raises:
        OutOfMemoryError, and torch's own: the schedule is pinned, or nothing is left to try.
    """
    report = job.report
    assert report is not None
    started = time.perf_counter()
    try:
        if _sweeps(job, schedule):
            report.accumulator = "device"
            report.left_out = 0.0 if schedule.trimmed is None else schedule.trimmed.left_out
            tools = make_tools(job.call.device, schedule, timed=report.timed)
            left = list(groups(job.call.work, schedule.group))
            run = in_place if schedule.one_by_one else together
            how = "inputs in place: out of memory", "through slots"
            _as_they_lie(job, schedule, left, tools, run, how)
        elif runs_directly(job, schedule):
            report.accumulator = "none"
            left = groups_of(job, schedule)
            how = "monolithic call out of memory", "depth 0 -> 1"
            _as_they_lie(job, schedule, left, Tools(NoClock()), whole, how)
        else:
            if schedule.sweep:
                schedule = slots_instead(schedule, job.call.work)
            through_slots(job, schedule, list(groups(job.call.work, schedule.group)))
    finally:
        report.seconds = time.perf_counter() - started
    return job.results.make()


def _sweeps(job: Job, schedule: Schedule) -> bool:
    """Whether a pass runs on the inputs as they lie, all tasks at once or one by one."""
    call = job.call
    if not (schedule.sweep and job.in_place and job.lse_here and call.mask is None):
        return False
    return not schedule.one_by_one or (takes_tasks(call.kernel, call.work) and not job.divided)


def _as_they_lie(
    job: Job,
    schedule: Schedule,
    left: list[Group],
    tools: Tools,
    run: _Run,
    how: tuple[str, str],
) -> None:
    """Run the head groups ``left`` without slots, and through slots what memory leaves of them.

    Groups that are done stay done: their results are where they belong.
    """
    report, every = job.report, len(left)
    assert report is not None
    began = time.perf_counter()
    failure = None
    try:
        for units in run(job, schedule, left, tools):
            left.pop(0)
            report.units += units
            began = time.perf_counter()
    except Exception as error:
        if schedule.pinned or not is_out_of_memory(error):
            raise
        # Only the text is kept: the traceback holds the failed attempt's tensors.
        failure = first_line(error)
    report.stages = tools.clock.seconds()
    if failure is None:
        return
    # Its frame is gone, and what it held.
    backend_of(job.call.device).give_back_cached()
    report.recovery_seconds += time.perf_counter() - began
    work = job.call.work
    if schedule.sweep:
        schedule = slots_instead(schedule, work)
    else:
        schedule = replace(schedule.deeper(work), n_cap=1)
    done = every - len(left)
    kept = f", {done} of {every} head groups done" if done else ""
    report.recoveries.append(f"{how[0]} ({failure}{kept}): {how[1]}")
    through_slots(job, schedule, left)
