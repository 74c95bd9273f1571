"""Tasks one by one on inputs that lie where they are computed, for kernels of whole tasks.

A kernel that takes a task in one launch (``TaskCalls``) reads its part of the call where it lies
and returns results of its own. Rows that no other task has are written where they belong, in the
dtype they have; only those that several tasks have are merged in a state. So there are no slots,
nothing is copied before it is computed, and of a sparse mask's results hardly any are merged.
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
from quorum_attention.execution.takes import Bytes, Load, kept_bytes, moved_bytes, state_bytes
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.trimming import Tally
from quorum_attention.execution.workload import Group, Workload, count_groups
from quorum_attention.kernels.copies import copy_on_device
from quorum_attention.kernels.protocol import InnerKernel, TaskCalls, TaskTensors
from quorum_attention.kernels.traits import task_calls


def takes_tasks(kernel: InnerKernel, work: Workload) -> bool:
    """Whether tasks of such a call can be run in place by ``kernel``: none is scaled here."""
    calls = task_calls(kernel)
    return calls is not None and calls.takes_tasks(work.dtype) and not scales(kernel, work)


@lru_cache(maxsize=64)
def rectangles_in_place(
    work: Workload, shape: Decomposition
) -> tuple[Task, tuple[tuple[Rectangle, ...], ...]]:
    """The whole sequence as a task, and every task's rectangles in it."""
    found = []
    for task in shape.tasks():
        parts = task.rectangles(work.is_causal, work.n_queries, work.n_keys)
        found.append(tuple(part for r in parts for part in _in_the_sequence(task, r)))
    return Decomposition(shape.n_tokens).task(()), tuple(found)


def _in_the_sequence(task: Task, r: Rectangle) -> Iterator[Rectangle]:
    """``r`` in positions of the sequence: neighbours in a task need not be neighbours there."""
    for queries, keys, causal in task.contiguous(r):
        yield Rectangle(queries.start, queries.stop, keys.start, keys.stop, causal)


@dataclass(frozen=True, slots=True)
class InPlace(OverInputs):
    """The tasks of a head group one after the other.

    Attributes:
        trimmed: what the tasks come to without tokens that the kernel's mask leaves alone.
    """

    trimmed: Tally | None = None

    words = "inputs in place, task by task"

    @classmethod
    def offered(cls, choice: Choice) -> Iterator[InPlace]:
        """The one that a search looks at."""
        yield cls(choice.trimmed)

    def task_rows(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """Of the sequence, from a task's first token to its last."""
        tokens = work.n_tokens if self.trimmed is None else self.trimmed.widest
        return min(tokens, work.n_queries), min(tokens, work.n_keys)

    def runs(self, schedule: Schedule, case: Case) -> bool:
        """Whether, besides, nothing is divided or scaled, and the kernel takes tasks."""
        here = OverInputs.runs(self, schedule, case) and not case.place.is_divided
        return here and takes_tasks(case.kernel, case.work)

    def takes(self, schedule: Schedule, case: Case) -> Bytes:
        """States of rows that several tasks have: others are written where they belong."""
        shared = None if self.trimmed is None else self.trimmed.shared
        return Bytes(
            case.workspace(replace(schedule.extent(case.work), direct=True)),
            0,
            (*state_bytes(case, schedule.group, shared, kept=True), *kept_bytes(case)),
            self.results(schedule, case),
        )

    def load(self, schedule: Schedule, case: Case) -> Load:
        """Every task's results are written once more, and its copies issued."""
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
        """One, of the same tasks."""
        return Slots(1, "device", 1, self.trimmed).slots(**changes)

    def run(self, job: Job, schedule: Schedule, machine: Machine, tools: Tools) -> Iterator[int]:
        """Make the results of the head groups that are left, one after the other."""
        job.results.make()
        n_tasks = schedule.decomposition.n_tasks
        n_groups = len(machine.groups_left)
        for number, group in enumerate(machine.whole_groups(HERE)):
            tasks = _tasks(job, schedule, group, tools)
            held = _Group(job, group, tasks, tools)
            for done, task in enumerate(tasks):
                held.run(done, task)
                job.tell(number * n_tasks + done + 1, n_groups * n_tasks)
            held.fill()
            del held
            yield n_tasks


class _Group:
    """A head group at work: its results, and the state of rows that several tasks have."""

    def __init__(self, job: Job, group: Group, tasks: list[TaskTensors], tools: Tools) -> None:
        work, states = job.call.work, job.spec.states
        self.spec, self.clock = job.spec, tools.clock
        kernel = task_calls(job.call.kernel)
        assert kernel is not None
        self.kernel = kernel
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

    def run(self, number: int, task: TaskTensors) -> None:
        """Compute a task and bring its parts where they belong."""
        pieces = [rows.tasks[number] for rows in self.held]
        if not pieces[0]:
            return
        with self.clock.timed("compute"):
            parts = self.spec.of_task(self.kernel, task, self.given)
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
        """Rows that no task has."""
        for state, result, rows in zip(self.spec.states, self.results, self.held, strict=True):
            for here in rows.nobody:
                result[:, :, here] = state.fill


def _spans(kernel: TaskCalls, tasks: list[TaskTensors]) -> dict[Axis, list[tuple[int, int] | None]]:
    """Of every task the queries and the keys that a call of it takes."""
    found = [kernel.task_span(task) for task in tasks]
    return {
        "query": [None if one is None else (one[0].start, one[0].stop) for one in found],
        "key": [None if one is None else (one[1].start, one[1].stop) for one in found],
    }


def _tasks(job: Job, schedule: Schedule, group: Group, tools: Tools) -> list[TaskTensors]:
    whole, every = rectangles_in_place(job.call.work, schedule.decomposition)
    one = job.lying(schedule.limits, group, tools, whole, ())
    return [replace(one, rectangles=rectangles) for rectangles in every]


# Functions of their own, so that no view of a part outlives it.


def _combine(
    combine: Callable[..., None],
    states: list[torch.Tensor],
    parts: list[torch.Tensor],
    pieces: tuple[HeldRows, ...],
) -> None:
    """Bring parts of rows that several tasks have into their states."""
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
    """What is final now: rows that only this task has, and those that no later one has."""
    for piece in pieces:
        if piece.holder == "only":
            copy_on_device(target[:, :, piece.rows], part[:, :, piece.part])
        elif piece.holder == "last":
            target[:, :, piece.rows].copy_(state[:, :, piece.state])
