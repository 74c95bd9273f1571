"""The route ``in_place``: one task after the other, on inputs that are on the computing device.

It needs a kernel that computes a task in one launch (``task_calls``). The kernel reads the task's
part of the inputs where it lies, and returns new tensors. Rows that only this task has are copied
from them straight to the results. Rows that several tasks have are merged in a state first. So
there are no slots and no copies of inputs, and under a sparse mask hardly any rows are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.execution.case import Case
from quorum_attention.execution.control.machine import HERE, Machine
from quorum_attention.execution.job import Job
from quorum_attention.execution.routes.choice import Choice
from quorum_attention.execution.routes.over_inputs import OverInputs
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.rows import Axis, group_part
from quorum_attention.execution.scaling import scales
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.shares import HeldRows, shares
from quorum_attention.execution.takes import Bytes, Load, final_bytes, moved_bytes, state_bytes
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.trimming import Tally
from quorum_attention.execution.workload import Group, Workload, count_groups
from quorum_attention.kernels.bias import join_sinks_
from quorum_attention.kernels.protocol import InnerKernel, TaskTensors
from quorum_attention.kernels.tensors import copy_on_device


def takes_tasks(kernel: InnerKernel, work: Workload) -> bool:
    """Whether ``kernel`` can compute tasks of such a call in place. Scaled ones it cannot."""
    return kernel.takes_tasks(work.dtype) and not scales(kernel, work)


@lru_cache(maxsize=64)
def rectangles_in_place(
    work: Workload, shape: Decomposition
) -> tuple[Task, tuple[tuple[Rectangle, ...], ...]]:
    """The whole sequence as one task, and the rectangles of every task of ``shape`` in it."""
    found = [
        tuple(
            Rectangle(queries.start, queries.stop, keys.start, keys.stop, causal)
            for r in task.rectangles(work.is_causal, work.n_queries, work.n_keys)
            for queries, keys, causal in task.contiguous(r)
        )
        for task in shape.tasks()
    ]
    return Decomposition(shape.n_tokens).task(()), tuple(found)


@dataclass(frozen=True, slots=True)
class InPlace(OverInputs):
    """The tasks of a head group one after the other.

    Attributes:
        trimmed: sizes of the tasks trimmed by the kernel's mask; None: they are not trimmed.
    """

    trimmed: Tally | None = None

    words = "inputs in place, task by task"

    @classmethod
    def offered(cls, choice: Choice) -> Iterator[InPlace]:
        """The only one that a search tries."""
        yield cls(choice.trimmed)

    def task_rows(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """Rows from the first token of a task to its last, for the task with most of them."""
        tokens = work.n_tokens if self.trimmed is None else self.trimmed.widest
        return min(tokens, work.n_queries), min(tokens, work.n_keys)

    def runs(self, schedule: Schedule, case: Case) -> bool:
        """Whether no gradient is divided or scaled either, and the kernel takes whole tasks."""
        here = OverInputs.runs(self, schedule, case) and not case.place.is_divided
        return here and takes_tasks(case.kernel, case.work)

    def takes(self, schedule: Schedule, case: Case) -> Bytes:
        """Besides the results, only rows that several tasks have need a state."""
        shared = None if self.trimmed is None else self.trimmed.shared
        return Bytes(
            case.workspace(replace(schedule.extent(case.work), direct=True)),
            0,
            (*state_bytes(case, schedule.group, shared, all_states=True), *final_bytes(case)),
            self.results(schedule, case),
        )

    def load(self, schedule: Schedule, case: Case) -> Load:
        """Each task is a unit: its results are copied once more, by a few copies."""
        units = count_groups(case.work, schedule.group) * schedule.n_tasks
        return Load(
            units=units,
            merges=False,
            rewritten=schedule.visits(case.work) * moved_bytes(case)[1],
            set_up=units,
            copies=4,
            begun=units,
        )

    def slots(self, **changes: Any) -> Slots:
        """One slot, for the same tasks."""
        return Slots(1, "device", 1, self.trimmed).slots(**changes)

    def run(self, job: Job, schedule: Schedule, machine: Machine, tools: Tools) -> Iterator[int]:
        """Compute the head groups that are left, one after the other."""
        job.results.make()
        n_tasks = schedule.decomposition.n_tasks
        n_groups = len(machine.groups_left)
        whole, every = rectangles_in_place(job.call.work, schedule.decomposition)
        for number, group in enumerate(machine.whole_groups(HERE)):
            one = job.task_in_place(schedule.limits, group, tools, whole, ())
            tasks = [replace(one, rectangles=rectangles) for rectangles in every]
            held = _Group(job, group, tasks, tools)
            for done, task in enumerate(tasks):
                held.run(done, task)
                job.tell(number * n_tasks + done + 1, n_groups * n_tasks)
            held.fill()
            del held
            yield n_tasks


class _Group:
    """A head group that is being computed: its results, and the states of shared rows.

    Attributes:
        held: for each state of the pass, which rows each task has, and with which others.
        results: the group's part of each result, a view.
        states: for each state of the pass, the rows that several tasks have.
        given: the inputs of the pass beside query, key and value.
    """

    def __init__(self, job: Job, group: Group, tasks: list[TaskTensors], tools: Tools) -> None:
        work, states = job.call.work, job.spec.states
        self.spec, self.clock = job.spec, tools.clock
        self.kernel = job.call.kernel
        lengths = {"query": work.n_queries, "key": work.n_keys}
        by_axis = {
            axis: shares(spans, lengths[axis]) for axis, spans in _spans(self.kernel, tasks).items()
        }
        self.held = [by_axis[state.axis] for state in states]
        self.results = [
            group_part(result, group, state.axis)
            for state, result in zip(states, job.results.make(), strict=True)
        ]
        self.states = [
            torch.empty(
                (1, result.shape[1], rows.n_shared, *result.shape[3:]),
                dtype=work.state_dtype,
                device=job.call.device,
            )
            for result, rows in zip(self.results, self.held, strict=True)
        ]
        self.given = job.operands(group)
        sinks = job.call.sinks
        forward = sinks is not None and not job.spec.backward
        self.sinks = sinks[group.query_heads] if forward and sinks is not None else None
        self.fills = [job.fill(state, group) for state in states]

    def run(self, number: int, task: TaskTensors) -> None:
        """Compute task ``number``, merge its shared rows, and write its final rows."""
        pieces = [rows.tasks[number] for rows in self.held]
        if not pieces[0]:
            return
        with self.clock.timed("compute"):
            parts = self.spec.of_task(self.kernel, task, self.given)
            if self.sinks is not None:
                _take_in(parts, self.sinks, pieces[0])
            with self.clock.timed("merge"):
                for together in self.spec.combined:
                    _combine(
                        self.spec.combine,
                        [self.states[index] for index in together],
                        [parts[index] for index in together],
                        pieces[together[0]],
                    )
        with self.clock.timed("scatter"):
            for made in zip(self.results, parts, self.states, pieces, strict=True):
                _put(*made)

    def fill(self) -> None:
        """Fill the rows of the results that no task has."""
        for fill, result, rows in zip(self.fills, self.results, self.held, strict=True):
            for here in rows.nobody:
                result[:, :, here] = fill.squeeze(-1) if isinstance(fill, torch.Tensor) else fill


def _spans(
    kernel: InnerKernel, tasks: list[TaskTensors]
) -> dict[Axis, list[tuple[int, int] | None]]:
    """For every task the [start, stop) of its queries and of its keys; None if it keeps no pair."""
    found = [kernel.task_span(task) for task in tasks]
    return {
        "query": [None if one is None else (one[0].start, one[0].stop) for one in found],
        "key": [None if one is None else (one[1].start, one[1].stop) for one in found],
    }


# These are functions so that their views of a part are gone when they return: views left over
# would keep the part's memory while the next task is computed.


def _take_in(
    parts: tuple[torch.Tensor, ...], sinks: torch.Tensor, pieces: tuple[HeldRows, ...]
) -> None:
    """Take the sinks into the rows of (out, lse) that no task before has."""
    for piece in pieces:
        if piece.holder in ("first", "only"):
            out, lse = (part[:, :, piece.part] for part in parts)
            join_sinks_(out, lse, sinks)


def _combine(
    combine: Callable[..., None],
    states: list[torch.Tensor],
    parts: list[torch.Tensor],
    pieces: tuple[HeldRows, ...],
) -> None:
    """Merge a task's parts of the rows that several tasks have into the states of those rows."""
    for piece in pieces:
        there = [state[:, :, piece.state] for state in states]
        mine = [part[:, :, piece.part] for part in parts]
        if piece.holder == "first":
            for state, part in zip(there, mine, strict=True):
                state.copy_(part)
        elif piece.holder != "only":
            combine(*there, *mine)


def _put(
    target: torch.Tensor, part: torch.Tensor, state: torch.Tensor, pieces: tuple[HeldRows, ...]
) -> None:
    """Copy final rows to a result: rows that only this task has, and those no later task has."""
    for piece in pieces:
        if piece.holder == "only":
            copy_on_device(target[:, :, piece.rows], part[:, :, piece.part])
        elif piece.holder == "last":
            target[:, :, piece.rows].copy_(state[:, :, piece.state])
