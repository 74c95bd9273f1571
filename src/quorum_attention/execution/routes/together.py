"""All tasks of a head group at once, on inputs that lie where they are computed.

Between them the tasks of a level keep every pair once. Where nothing has to be moved and the
state of a whole head group fits, they need not run one by one: the chunks of the whole sequence
are halved as those of a task are, into fewer and larger rectangles, which are read and merged in
place. A few kernel calls do what as many tasks would take several each for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.execution.job import Job
from quorum_attention.execution.rows import group_part
from quorum_attention.execution.scaling import Computed, Level
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.workload import Group, Workload
from quorum_attention.kernels.copies import copy_on_device
from quorum_attention.kernels.protocol import TaskTensors
from quorum_attention.kernels.scaling import Scaling


@lru_cache(maxsize=64)
def _all_rectangles(work: Workload, shape: Decomposition) -> tuple[Task, tuple[Rectangle, ...]]:
    """Every pair of a head group as rectangles of one task."""
    task = shape.whole()
    return task, task.rectangles(work.is_causal, work.n_queries, work.n_keys)


def together(job: Job, schedule: Schedule, left: Sequence[Group], tools: Tools) -> Iterator[int]:
    """Make the results of the head groups ``left``, one after the other; yields after each."""
    job.results.make()
    task, rectangles = _all_rectangles(job.call.work, schedule.decomposition)
    remaining = list(left)
    for done, group in enumerate(remaining, start=1):
        tensors = job.lying(schedule, group, tools, task, rectangles)
        job.repeated(compute_group(job, tensors, group, tools))
        job.tell(done, len(remaining))
        yield schedule.decomposition.n_tasks


def compute_group(job: Job, task: TaskTensors, group: Group, tools: Tools) -> int:
    """Put the results of a head group, all of it ``task``, where they belong; returns how often it
    had to be run again (execution/scaling.py)."""
    call, work, spec = job.call, job.call.work, job.spec
    given = job.operands(group)
    divided = spec.divided if job.scaled else None
    upstream = None if divided is None else given[divided]
    if divided is not None and upstream is not None:
        given[divided] = torch.empty(upstream.shape, dtype=work.dtype, device=call.device)
    targets = [
        group_part(result, group, state.axis)
        for state, result in zip(spec.states, job.results.make(), strict=True)
    ]
    states = [
        # What has the state's dtype accumulates where it belongs.
        target.fill_(state.fill)
        if state.over is None
        else torch.zeros(target.shape, dtype=work.state_dtype, device=call.device)
        for state, target in zip(spec.states, targets, strict=True)
    ]
    scaling, level, repeated = Scaling(), Level(work.n_keys), 0
    while True:
        if divided is not None and upstream is not None:
            with tools.clock.timed("gather"):
                sizes = task.value.shape[:2]
                unscale = torch.empty(sizes, dtype=torch.float32, device=call.device)
                overflow = torch.zeros(sizes, dtype=torch.int32, device=call.device)
                copy_on_device(given[divided], upstream)
                level.divide_(given[divided], task.value, unscale)
            scaling = Scaling(level.shift, unscale, overflow)
        with tools.clock.timed("compute"):
            spec.accumulate(call.kernel, task, given, states, scaling)
        if upstream is None or scaling.overflow is None or not bool(scaling.overflow.any()):
            break
        computed = Computed(
            task.query, given["out"], upstream, given["lse"].unsqueeze(-1), task.key, task.value,
            *states,
        )  # fmt: skip
        if not level.lower(scaling.overflow, computed):
            break
        repeated += 1
        for state in states:
            state.zero_()
    with tools.clock.timed("scatter"):
        for spec_of_state, target, made in zip(spec.states, targets, states, strict=True):
            if spec_of_state.over is not None:
                factor = job.factor(group, spec_of_state.axis)
                if factor is not None:
                    made.mul_(factor)
                target.copy_(made)
    return repeated
