"""All tasks of a head group at once, on inputs that lie where they are computed.

Between them the tasks of a level keep every pair once. Where nothing has to be moved and the
state of a whole head group fits, they need not run one by one: the chunks of the whole sequence
are halved as those of a task are, into fewer and larger rectangles, which are read and merged in
place. A few kernel calls do what as many tasks would take several each for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.execution.call import (
    AXES,
    BackwardResults,
    Call,
    ForwardResults,
    Three,
    operand,
)
from quorum_attention.execution.in_place import as_they_lie, takes_tasks
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.rows import group_part
from quorum_attention.execution.scaling import Computed, Level, scales
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.tools import Progress, Tools
from quorum_attention.execution.upstream import Upstream
from quorum_attention.execution.workload import Group, Workload, groups
from quorum_attention.kernels.copies import copy_on_device
from quorum_attention.kernels.protocol import Gradients, Statistics, TaskTensors
from quorum_attention.kernels.scaling import Scaling


def sweeps(call: Call, schedule: Schedule) -> bool:
    """Whether a pass runs on the inputs as they lie, all tasks at once or one by one."""
    able = not schedule.one_by_one or takes_tasks(call.kernel, call.work)
    return schedule.sweep and able and call.in_place and call.mask is None


@lru_cache(maxsize=64)
def swept_rectangles(work: Workload, shape: Decomposition) -> tuple[Task, tuple[Rectangle, ...]]:
    """Every pair of a head group as rectangles of one task."""
    task = shape.whole()
    return task, task.rectangles(work.is_causal, work.n_queries, work.n_keys)


def forward_sweep(
    call: Call, schedule: Schedule, results: ForwardResults, tools: Tools, progress: Progress | None
) -> Iterator[None]:
    """Fill ``results``, a head group at a time."""
    work, device = call.work, call.device
    out, lse = results.made()
    everything = list(groups(work, schedule.group))
    for done, group in enumerate(everything, start=1):
        task = as_they_lie(
            call, schedule, group, tools, *swept_rectangles(work, schedule.decomposition)
        )
        shape = (*task.query.shape[:3], work.value_dim)
        state_out = torch.zeros(shape, dtype=work.state_dtype, device=device)
        state_lse = group_part(lse, group, "query").fill_(float("-inf"))
        with tools.clock.timed("compute"):
            call.kernel.forward(task, Statistics(state_out, state_lse))
        with tools.clock.timed("scatter"):
            group_part(out, group, "query").copy_(state_out)
        del state_out
        if progress is not None:
            progress(done, len(everything), "forward")
        yield


def backward_sweep(
    call: Call,
    schedule: Schedule,
    upstream: Upstream,
    out: torch.Tensor,
    lse: torch.Tensor,
    results: BackwardResults,
    tools: Tools,
    progress: Progress | None,
    report: PassReport,
) -> Iterator[None]:
    """Fill ``results``, a head group at a time."""
    work = call.work
    grads = results.made()
    everything = list(groups(work, schedule.group))
    for done, group in enumerate(everything, start=1):
        task = as_they_lie(
            call, schedule, group, tools, *swept_rectangles(work, schedule.decomposition)
        )
        report.repeated_units += backward_group(call, task, group, upstream, out, lse, grads, tools)
        if progress is not None:
            progress(done, len(everything), "backward")
        yield


def backward_group(
    call: Call,
    task: TaskTensors,
    group: Group,
    upstream: Upstream,
    out: torch.Tensor,
    lse: torch.Tensor,
    grads: Three,
    tools: Tools,
) -> int:
    """Put the gradients of a head group, all of it ``task``, into ``grads``; returns how often it
    had to be run again (execution/scaling.py)."""
    work, repeated = call.work, 0
    given, result, row_lse = (
        group_part(tensor, group, "query") for tensor in (upstream.tensor, out, lse)
    )
    result = operand(result, work.dtype)
    scaling, level = Scaling(), Level(work.n_keys)
    scaled = scales(call.kernel, work)
    if scaled:
        grad_out = torch.empty(given.shape, dtype=work.dtype, device=call.device)
    else:
        grad_out = operand(given, work.dtype)
    states = [
        torch.zeros(t.shape, dtype=work.state_dtype, device=call.device)
        for t in (task.query, task.key, task.value)
    ]
    while True:
        if scaled:
            with tools.clock.timed("gather"):
                sizes = task.value.shape[:2]
                unscale = torch.empty(sizes, dtype=torch.float32, device=call.device)
                overflow = torch.zeros(sizes, dtype=torch.int32, device=call.device)
                copy_on_device(grad_out, given)
                level.divide_(grad_out, task.value, unscale)
            scaling = Scaling(level.shift, unscale, overflow)
        with tools.clock.timed("compute"):
            call.kernel.backward(
                task,
                Gradients(grad_out, result, row_lse, states[0], states[1], states[2], scaling),
            )
        if scaling.overflow is None or not bool(scaling.overflow.any()):
            break
        computed = Computed(
            task.query, result, given, row_lse.unsqueeze(-1), task.key, task.value, *states
        )
        if not level.lower(scaling.overflow, computed):
            break
        repeated += 1
        for state in states:
            state.zero_()
    with tools.clock.timed("scatter"):
        for target, axis, state in zip(grads, AXES, states, strict=True):
            factor = upstream.factor(group, axis)
            if factor is not None:
                state.mul_(factor)
            group_part(target, group, axis).copy_(state)
    return repeated
