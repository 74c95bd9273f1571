"""Head groups computed over the inputs as they lie: no slots and no copies of
inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.decomposition.layouts import Pieces, pieces_of
from quorum_attention.execution.control.controller import RecoveryController
from quorum_attention.execution.footprint import accumulates_in_results, state_bytes
from quorum_attention.execution.head_groups import Group, GroupSize
from quorum_attention.execution.job import PassJob
from quorum_attention.execution.pass_spec import GRAD_OUT, StateSpec
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.scaling import (
    SMALL_BYTES,
    BackwardScaling,
    inputs_of_group,
)
from quorum_attention.execution.schedule import Route, Schedule
from quorum_attention.execution.slot_rows import PassStorage
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.device_copies import copy_on_device
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.task_tensors import TaskTensors
from quorum_attention.kernels.tensors import NamedTensors


def all_rectangles(
    shape: CallShape, decomposition: Decomposition, pieces: Pieces = "halves"
) -> tuple[Task, tuple[Rectangle, ...]]:
    """The whole sequence as one task, and rectangles of it that hold every pair of a
    call."""
    return pieces_of(
        decomposition,
        pieces,
        shape.is_causal,
        shape.n_queries,
        shape.n_keys,
    )


@dataclass(frozen=True, slots=True)
class InPlace(Route):
    """A route over the inputs as they lie, on the computing device."""

    def slots(self, **changes: Any) -> Slots:
        """Slots with the same fields, changed."""
        route = Slots(
            n_cap=self.n_cap,
            accumulator=self.accumulator,
            streams=self.streams,
            trimmed=self.trimmed,
        )
        return replace(route, **changes)

    @abstractmethod
    def compute(self, job: PassJob, schedule: Schedule, group: Group) -> int:
        """Compute a head group; returns how many of its tasks are done."""

    def run(
        self,
        job: PassJob,
        schedule: Schedule,
        controller: RecoveryController,
        storage: PassStorage | None,
    ) -> Iterator[int]:
        """Compute the head groups that are left, one after the other."""
        n_all_tasks = len(controller.groups_left) * schedule.decomposition.n_tasks
        n_done = 0
        for group in controller.whole_groups():
            n_tasks = self.compute(job, schedule, group)
            n_done += n_tasks
            job.report_progress(n_done, n_all_tasks)
            # A device with memory of its own may still be computing it.
            if job.on_stored is not None and not job.problem.backend.own_memory:
                job.on_stored(group)
            yield n_tasks


def allocated_bytes(problem: Problem, group: GroupSize) -> tuple[int, ...]:
    """Bytes of what ``compute_group`` allocates: the states; where it is scaled, a copy
    of the input that is divided, and a few numbers for every head."""
    states = () if accumulates_in_results(problem) else state_bytes(problem, group)
    if not problem.scaled:
        return states
    n_numbers = GRAD_OUT.count(problem.shape, group)
    copy_bytes = n_numbers * problem.shape.dtype.itemsize
    head_numbers = (SMALL_BYTES,) * 4
    return (*states, copy_bytes, *head_numbers)


def compute_group(
    job: PassJob, task: TaskTensors, group: Group, *, copies: bool = True
) -> None:
    """Compute a head group and write its results.

    Args:
        task: all of the head group.
        copies: whether to copy inputs that operators cannot read; if not, the kernel
            does.
    """
    saved: NamedTensors = {}
    for item in job.spec.saved_inputs:
        # An input that is divided is not copied: dividing it makes a copy anyway.
        is_divided = job.problem.scaled and item.name == GRAD_OUT.name
        saved[item.name] = job.input_part(item, group, copies=copies and not is_divided)
    targets = job.result_parts(group)
    states = [
        _begin_state(job, spec, group, target)
        for spec, target in zip(job.spec.states, targets, strict=True)
    ]
    if job.problem.scaled:
        _accumulate_scaled(job, task, group, saved, states)
    else:
        with job.clock.timed("compute"):
            job.spec.accumulate(
                job.kernel,
                task,
                saved,
                states,
                Scaling(),
            )
    with job.clock.timed("scatter"):
        for spec, target, state in zip(job.spec.states, targets, states, strict=True):
            _finish_state(job, spec, group, target, state)


def _begin_state(
    job: PassJob, spec: StateSpec, group: Group, target: torch.Tensor
) -> torch.Tensor:
    """The state of a head group before any pair: ``target`` itself, if the result has
    the state's dtype."""
    if spec.over is not None and not accumulates_in_results(job.problem):
        return torch.zeros(target.shape, dtype=job.shape.state_dtype, device=job.device)
    value = job.initial_value(spec, group)
    if isinstance(value, torch.Tensor):
        return target.copy_(value.squeeze(-1))  # (h, 1) to (1, h, rows)
    return target.fill_(value)


def _finish_state(
    job: PassJob,
    spec: StateSpec,
    group: Group,
    target: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Write a finished state to ``target``, the result's part."""
    if spec.over is None:
        return
    factor = job.finishing_factor(group, spec.axis)
    if factor is not None:
        state.mul_(factor)
    if not accumulates_in_results(job.problem):
        target.copy_(state)


def _accumulate_scaled(
    job: PassJob,
    task: TaskTensors,
    group: Group,
    saved: Mapping[str, torch.Tensor],
    states: list[torch.Tensor],
) -> None:
    """Add up a scaled backward's gradients; anew, scaled down further, while they
    overflow."""
    upstream = saved[GRAD_OUT.name]
    rescaled = torch.empty(upstream.shape, dtype=job.shape.dtype, device=job.device)
    inputs = {**saved, GRAD_OUT.name: rescaled}
    n_entries, kv_heads = task.value.shape[:2]
    scaling = BackwardScaling(job.shape, job.device, (n_entries, kv_heads))
    for n_repeats in scaling.runs(partial(inputs_of_group, job.tensors, group)):
        if n_repeats:
            job.count_repeat()
            for state in states:
                state.zero_()
        with job.clock.timed("gather"):
            copy_on_device(rescaled, upstream)
            undo = scaling.divide_(rescaled, task.value)
        with job.clock.timed("compute"):
            job.spec.accumulate(
                job.kernel,
                task,
                inputs,
                states,
                undo,
            )
