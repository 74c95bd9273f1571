"""The monolithic call: the inner kernel on the inputs as they lie, all at once or by head group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition, Rectangle
from quorum_attention.execution.call import flat_batch, operand
from quorum_attention.execution.case import Case
from quorum_attention.execution.control.machine import HERE, Machine
from quorum_attention.execution.device.residency import Home
from quorum_attention.execution.job import Job
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.routes.together import compute_group, scaled_bytes
from quorum_attention.execution.rows import group_part
from quorum_attention.execution.scaling import all_finite, asking
from quorum_attention.execution.schedule import Fallback, Route, Schedule
from quorum_attention.execution.takes import (
    Bytes,
    Load,
    bytes_before,
    copied_bytes,
    kept_bytes,
    result_bytes,
)
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.workload import Group, GroupSize, Workload, count_groups, groups
from quorum_attention.kernels.outside import capturing
from quorum_attention.kernels.traits import whole_calls


@dataclass(frozen=True, slots=True)
class Whole(Route):
    """One kernel call for each head group, or for all of them: nothing is cut.

    Attributes:
        otherwise: the slots that it goes through where it cannot run.
    """

    otherwise: Slots = field(default_factory=Slots)

    words = "inputs in place, nothing to merge"
    accumulators = "none"
    measured = False

    @property
    def n_cap(self) -> int:
        """Slots, where it goes through some."""
        return self.otherwise.n_cap

    @property
    def accumulator(self) -> Home:
        """Where the travelling state lives, where there is some."""
        return self.otherwise.accumulator

    def check(self, shape: Decomposition, group: GroupSize) -> None:
        """Refuse a decomposition into several tasks."""
        if shape.depth:
            raise ValueError(f"levels {shape.levels} are not one whole call")

    def limits(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """There is one rectangle."""
        return work.n_queries, work.n_keys

    def runs(self, schedule: Schedule, case: Case) -> bool:
        """Whether the kernel can take all of a head group in one call, and give the results."""
        work = case.work
        if not case.place.in_place or (case.spec.backward and not _gives_results(case)):
            return False
        # Several batch dimensions may have no flat view: entries are then run one by one.
        every = schedule.is_all(work) and len(work.batch_shape) <= 1
        calls, masked = whole_calls(case.kernel), work.mask is not None
        return (
            calls is not None
            and calls.takes_whole(work.heads, work.kv_heads, work.n_tokens, masked, every)
            and _is_everything(_rectangles(work, schedule.decomposition), work)
        )

    def takes(self, schedule: Schedule, case: Case) -> Bytes:
        """The kernel's own results are returned where nothing was given, or has to be cast."""
        work = case.work
        workspace = case.workspace(replace(schedule.extent(work), direct=True))
        accumulators: list[int] = []
        for item in case.spec.inputs:
            if item.of_state:
                # Copied, to take -inf out of it, by a mask.
                size = item.count(work) * work.state_dtype.itemsize
                accumulators += [size, size, item.count(work)]
        if case.scaled:
            # One head at a time where an operator's gradients are not finite.
            one = replace(schedule, group=GroupSize(1, 1))
            accumulators += scaled_bytes(case, one.group)
            workspace = max(workspace, case.workspace(one.extent(work)))
        results = result_bytes(case)
        if not schedule.is_all(work):
            results += kept_bytes(case)
        elif case.place.result_dtype == work.dtype and not case.scaled:
            results = ()
        given = (*bytes_before(case), *copied_bytes(case, schedule.group))
        return Bytes(workspace, 0, tuple(accumulators), (*given, *results))

    def load(self, schedule: Schedule, case: Case) -> Load:
        """The calls, and nothing else."""
        units = count_groups(case.work, schedule.group)
        return Load(units=units, uncut=True, merges=False)

    def slots(self, **changes: Any) -> Slots:
        """Those given."""
        return self.otherwise.slots(**changes)

    def fallback(self, schedule: Schedule, work: Workload) -> Fallback:
        """One level, through one slot."""
        deeper = schedule.deeper(work).changed(n_cap=1)
        return Fallback(deeper, "monolithic call out of memory", "depth 0 -> 1")

    def groups(self, job: Job, schedule: Schedule) -> list[Group]:
        """One for each call of the kernel: everything, or one batch entry's.

        Where something the pass reads has no (b, heads, n, d) view, entries are run one by one.
        """
        work = job.call.work
        rows = (job.tensors[item.name] for item in job.spec.inputs if item.width != "one")
        size = schedule.group
        if not schedule.is_all(work) or any(flat_batch(t) is None for t in rows):
            size = replace(size, batch=1)
        return list(groups(work, size))

    def run(self, job: Job, schedule: Schedule, machine: Machine, tools: Tools) -> Iterator[int]:
        """Make the results of the head groups that are left, a kernel call at a time."""
        call, work = job.call, job.call.work
        task = schedule.decomposition.task(())
        (rectangle,) = _rectangles(work, schedule.decomposition)
        every = next(groups(work, GroupSize(work.batch, work.kv_heads)))
        lse = job.tensors.get("lse")
        if lse is not None:
            lse = _without_empty_rows(lse.to(call.device))
        n_groups = len(machine.groups_left)
        for done, group in enumerate(machine.whole_groups(HERE), start=1):
            alone = None if group == every else group
            parts = _of_call(job, alone, lse, rectangle.causal, job.bias(group, task)(rectangle))
            if parts is None:
                job.repeated(1)
                _scaled(job, schedule, group, machine, tools)
            elif alone is None:
                job.results.take(parts)
            else:
                for state, result, part in zip(
                    job.spec.states, job.results.make(), parts, strict=True
                ):
                    group_part(result, group, state.axis).copy_(part)
                    # Let go before the next group's are made: the plan counts one group's results.
                    del part
            del parts
            job.tell(done, n_groups)
            yield 1


def _gives_results(case: Case) -> bool:
    """Whether an operator's gradients can be the results as they are. (What a scaled backward
    rounds to 16 bits is not right in 32.)"""
    exact = case.place.result_dtype == case.work.dtype or not case.scaled
    return exact and not case.place.is_divided


def _is_everything(rectangles: tuple[Rectangle, ...], work: Workload) -> bool:
    """Whether there is one rectangle, of all queries and all keys. (With more keys than queries a
    causal one leaves keys out, and operators differ on what they make of the rest.)"""
    sizes = [(r.n_queries, r.n_keys) for r in rectangles]
    return sizes == [(work.n_queries, work.n_keys)]


@lru_cache(maxsize=256)
def _rectangles(work: Workload, shape: Decomposition) -> tuple[Rectangle, ...]:
    return shape.task(()).rectangles(work.is_causal, work.n_queries, work.n_keys)


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


def _scaled(job: Job, schedule: Schedule, group: Group, machine: Machine, tools: Tools) -> None:
    """A head group whose gradients an operator did not bring out finite: scaled, head by head."""
    work, task = job.call.work, schedule.decomposition.task(())
    rectangles = task.rectangles(work.is_causal, work.n_queries, work.n_keys)
    job.results.make()
    for entry in group.entries:
        for head in range(group.kv_start, group.kv_stop):
            one = replace(group, entries=(entry,), kv_start=head, kv_stop=head + 1)
            tensors = job.lying(schedule.limits, one, tools, task, rectangles)
            compute_group(job, tensors, one, tools, asking(machine, group, part=one))
