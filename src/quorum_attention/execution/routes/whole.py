"""The monolithic call: the inner kernel on the inputs as they lie, all at once or by head group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.execution.call import flat_batch, operand
from quorum_attention.execution.job import Job
from quorum_attention.execution.routes.together import compute_group
from quorum_attention.execution.rows import group_part
from quorum_attention.execution.scaling import all_finite, scales
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.workload import Group, GroupSize, Workload, groups
from quorum_attention.kernels.outside import capturing
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.traits import whole_calls


def runs_directly(job: Job, schedule: Schedule) -> bool:
    """Whether the inner kernel can take the inputs as they lie: no slots, nothing to merge."""
    call = job.call
    if not (job.in_place and runs_whole(call.work, schedule, call.kernel)):
        return False
    if not job.spec.backward:
        return True
    return gives_directly(call.kernel, call.work, job.results.dtype, divided=job.divided)


def gives_directly(
    kernel: InnerKernel, work: Workload, dtype: torch.dtype, *, divided: bool
) -> bool:
    """Whether an operator's gradients can be the results as they are.

    Args:
        dtype: of the results. What a scaled backward rounds to 16 bits is not right in 32.
        divided: the upstream gradient was divided (execution/upstream.py).
    """
    return not divided and (dtype == work.dtype or not scales(kernel, work))


def runs_whole(work: Workload, schedule: Schedule, kernel: InnerKernel) -> bool:
    """Whether ``kernel`` can take all of a head group in one call of its operator."""
    masked = work.mask is not None
    # Several batch dimensions may have no flat view: entries are then run one by one.
    every = schedule.group == GroupSize(work.batch, work.kv_heads) and len(work.batch_shape) <= 1
    calls = whole_calls(kernel)
    return (
        schedule.decomposition.depth == 0
        and calls is not None
        and calls.takes_whole(work.heads, work.kv_heads, work.n_tokens, masked, every)
        and _is_everything(_rectangles(work, schedule), work)
    )


def _is_everything(rectangles: tuple[Rectangle, ...], work: Workload) -> bool:
    """Whether there is one rectangle, of all queries and all keys. (With more keys than queries a
    causal one leaves keys out, and operators differ on what they make of the rest.)"""
    sizes = [(r.n_queries, r.n_keys) for r in rectangles]
    return sizes == [(work.n_queries, work.n_keys)]


@lru_cache(maxsize=256)
def _rectangles(work: Workload, schedule: Schedule) -> tuple[Rectangle, ...]:
    return schedule.decomposition.task(()).rectangles(
        work.is_causal, work.n_queries, work.n_keys, schedule.max_queries, schedule.max_keys
    )


def groups_of(job: Job, schedule: Schedule) -> list[Group]:
    """The head groups of the kernel's calls: everything, or one batch entry's at a time.

    Where something the pass reads has no (b, heads, n, d) view, batch entries are run one by one.
    """
    work = job.call.work
    rows = (job.tensors[item.name] for item in job.spec.inputs if item.width != "one")
    size = schedule.group
    if size != GroupSize(work.batch, work.kv_heads) or any(flat_batch(t) is None for t in rows):
        size = replace(size, batch=1)
    return list(groups(work, size))


def whole(job: Job, schedule: Schedule, left: Sequence[Group], tools: Tools) -> Iterator[int]:
    """Make the results of the head groups ``left``, a kernel call at a time; yields after each."""
    call, work = job.call, job.call.work
    task = schedule.decomposition.task(())
    (rectangle,) = _rectangles(work, schedule)
    every = next(groups(work, GroupSize(work.batch, work.kv_heads)))
    lse = job.tensors.get("lse")
    if lse is not None:
        lse = _without_empty_rows(lse.to(call.device))
    remaining = list(left)
    for done, group in enumerate(remaining, start=1):
        alone = None if group == every else group
        parts = _of_call(job, alone, lse, rectangle.causal, job.bias(group, task)(rectangle))
        if parts is None:
            job.repeated(1)
            _scaled(job, schedule, group, tools)
        elif alone is None:
            job.results.take(parts)
        else:
            for state, result, part in zip(job.spec.states, job.results.make(), parts, strict=True):
                group_part(result, group, state.axis).copy_(part)
                # Let go before the next group's are made: the plan counts one group's results.
                del part
        del parts
        job.tell(done, len(remaining))
        yield 1


def at_once(job: Job) -> tuple[torch.Tensor, ...] | None:
    """The results of a call so short that making a schedule would take longer: one kernel call, no
    plan, nothing cut. At most one batch dimension, and an upstream gradient in the inputs' dtype.

    None where an operator did not bring them out finite in 16 bits: they may be finite once they
    are scaled.
    """
    call, lse = job.call, job.tensors.get("lse")
    if lse is not None:
        lse = _without_empty_rows(lse)
    mask = None if call.mask is None else call.mask.whole(call.work.dtype, call.device)
    parts = _of_call(job, None, lse, call.work.is_causal, mask)
    return None if parts is None else job.results.take(parts)


def _of_call(
    job: Job,
    group: Group | None,
    lse: torch.Tensor | None,
    causal: bool,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, ...] | None:
    """The kernel's own results of a head group, or of all; None where a backward that has to be
    scaled did not bring them out finite."""
    call, work = job.call, job.call.work
    given = {}
    for item in job.spec.inputs:
        name = item.name
        tensor = lse if name == "lse" and lse is not None else job.tensors[name]
        part = _four(tensor, work) if group is None else group_part(tensor, group, item.axis)
        given[name] = operand(part, work.dtype) if item.copied else part
    kernel = whole_calls(call.kernel)
    assert kernel is not None
    parts = job.spec.of_call(kernel, given, causal, call.scale, bias, job.results.dtype)
    if job.scaled and not capturing(call.device) and not all_finite(parts):
        return None
    return parts


def _four(tensor: torch.Tensor, work: Workload) -> torch.Tensor:
    """(*batch, heads, ...) as (b, heads, ...), a view."""
    dims = len(work.batch_shape)
    if dims == 1:
        return tensor
    return tensor.reshape(work.batch, *tensor.shape[dims:]) if dims else tensor.unsqueeze(0)


def _without_empty_rows(lse: torch.Tensor) -> torch.Tensor:
    # A row without a key has lse -inf; with 0 in its place exp(-inf - 0) is 0, not NaN.
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _scaled(job: Job, schedule: Schedule, group: Group, tools: Tools) -> None:
    """A head group whose gradients an operator did not bring out finite: scaled, head by head."""
    work, task = job.call.work, schedule.decomposition.task(())
    rectangles = task.rectangles(work.is_causal, work.n_queries, work.n_keys)
    job.results.make()
    for entry in group.entries:
        for head in range(group.kv_start, group.kv_stop):
            one = replace(group, entries=(entry,), kv_start=head, kv_stop=head + 1)
            compute_group(job, job.lying(schedule, one, tools, task, rectangles), one, tools)
