"""All tasks of a head group at once, on inputs that lie where they are computed.

Between them the tasks of a level keep every pair once. Where nothing has to be moved and the
state of a whole head group fits, they need not run one by one: the chunks of the whole sequence
are halved as those of a task are, into fewer and larger rectangles, which are read and merged in
place. A few kernel calls do what as many tasks would take several each for.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.execution.call import Call, empty_result, operand
from quorum_attention.execution.in_place import as_they_lie, takes_tasks
from quorum_attention.execution.rows import Axis, group_part
from quorum_attention.execution.scaling import lower_shifts, scales, usual_shift
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.slots import OVERFLOW_FLAGS
from quorum_attention.execution.tools import Progress, Tools
from quorum_attention.execution.workload import Workload, groups
from quorum_attention.kernels.protocol import Gradients, Statistics
from quorum_attention.kernels.scaling import Scaling, divide_gradient_

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_AXES: tuple[Axis, Axis, Axis] = ("query", "key", "key")


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
    call: Call,
    schedule: Schedule,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    tools: Tools,
    progress: Progress | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as ``execution.forward`` returns them."""
    work, device = call.work, call.device
    rows = (*work.batch_shape, work.heads, work.n_queries)
    if out is None:
        out = empty_result((*rows, work.value_dim), out_dtype, device, "the output")
    lse = empty_result(rows, work.state_dtype, device, "the log-sum-exp")
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
    return out, lse


def backward_sweep(
    call: Call,
    schedule: Schedule,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grads: Three,
    tools: Tools,
    progress: Progress | None,
) -> int:
    """Fill ``grads``; returns how often a head group had to be run again (execution/scaling.py)."""
    work, repeated = call.work, 0
    scaled = scales(call.kernel, work)
    everything = list(groups(work, schedule.group))
    for done, group in enumerate(everything, start=1):
        task = as_they_lie(
            call, schedule, group, tools, *swept_rectangles(work, schedule.decomposition)
        )
        upstream = operand(group_part(grad_out, group, "query"), work.dtype)
        result = operand(group_part(out, group, "query"), work.dtype)
        scaling = Scaling()
        if scaled:
            upstream = upstream.clone(memory_format=torch.contiguous_format)
            unscale = torch.empty(task.value.shape[:2], dtype=torch.float32, device=call.device)
            with tools.clock.timed("gather"):
                shift = usual_shift(work.n_keys)
                divide_gradient_(upstream, task.value, unscale, shift)
            flags = torch.zeros(OVERFLOW_FLAGS, dtype=torch.int32, device=call.device)
            scaling = Scaling(shift, unscale, flags)
        states = [
            torch.zeros(t.shape, dtype=work.state_dtype, device=call.device)
            for t in (task.query, task.key, task.value)
        ]
        while True:
            with tools.clock.timed("compute"):
                call.kernel.backward(
                    task,
                    Gradients(
                        upstream, result, group_part(lse, group, "query"),
                        states[0], states[1], states[2], scaling,
                    ),
                )  # fmt: skip
            inputs = (task.query, task.key, task.value, upstream, result)
            if not scaled or not lower_shifts(scaling, scaling.overflow, inputs):
                break
            repeated += 1
            assert scaling.overflow is not None
            for tensor in (*states, scaling.overflow):
                tensor.zero_()
        with tools.clock.timed("scatter"):
            for target, axis, state in zip(grads, _AXES, states, strict=True):
                group_part(target, group, axis).copy_(state)
        del states, upstream, result, inputs
        if progress is not None:
            progress(done, len(everything), "backward")
    return repeated
