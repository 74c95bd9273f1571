"""Tasks one by one on inputs that lie where they are computed, for kernels of whole tasks.

A kernel that takes a task in one launch (``TaskCalls``) reads its part of the call where it lies
and returns results of its own. Rows that no other task has are written where they belong, in the
dtype they have; only those that several tasks have are merged in a state. So there are no slots,
nothing is copied before it is computed, and of a sparse mask's results hardly any are merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.execution.call import AXES, BackwardResults, Call, ForwardResults, operand
from quorum_attention.execution.masks import no_bias
from quorum_attention.execution.rows import group_part
from quorum_attention.execution.scaling import scales
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.shares import Piece, shares
from quorum_attention.execution.tools import Progress, Tools
from quorum_attention.execution.workload import Group, Workload, count_groups, flat_entries, groups
from quorum_attention.kernels.copies import copy_on_device
from quorum_attention.kernels.merge import add_, merge_
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
    for first, last, _ in task.segments(r.query_start, r.query_stop):
        for start, stop, _ in task.segments(r.key_start, r.key_stop):
            if r.causal and start > first:
                continue
            yield Rectangle(first, last, start, stop, causal=r.causal and start == first)


def forward_in_place(
    call: Call, schedule: Schedule, results: ForwardResults, tools: Tools, progress: Progress | None
) -> Iterator[None]:
    """Fill ``results``, a head group at a time."""
    work, device, kernel = call.work, call.device, task_calls(call.kernel)
    assert kernel is not None
    out, lse = results.made()
    steps = _Steps(work, schedule, progress, "forward")
    for group in groups(work, schedule.group):
        tasks = _tasks(call, schedule, group, tools)
        held = shares(_spans(kernel, tasks)[0], work.n_queries)
        target, target_lse = group_part(out, group, "query"), group_part(lse, group, "query")
        sizes = (1, target.shape[1], held.n_shared)
        state = torch.empty((*sizes, work.value_dim), dtype=work.state_dtype, device=device)
        state_lse = torch.empty(sizes, dtype=work.state_dtype, device=device)
        for task, pieces in zip(tasks, held.tasks, strict=True):
            if pieces:
                with tools.clock.timed("compute"):
                    part, part_lse = kernel.task_forward(task)
                    with tools.clock.timed("merge"):
                        _merge(state, state_lse, part, part_lse, pieces)
                with tools.clock.timed("scatter"):
                    _put(target, part, state, pieces)
                    _put(target_lse, part_lse, state_lse, pieces)
                del part, part_lse
            steps.done()
        for here in held.nobody:
            target[:, :, here] = 0.0
            target_lse[:, :, here] = -torch.inf
        del state, state_lse
        yield


def backward_in_place(
    call: Call,
    schedule: Schedule,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    results: BackwardResults,
    tools: Tools,
    progress: Progress | None,
) -> Iterator[None]:
    """Fill ``results``, a head group at a time."""
    work, kernel = call.work, task_calls(call.kernel)
    assert kernel is not None
    grads = results.made()
    steps = _Steps(work, schedule, progress, "backward")
    for group in groups(work, schedule.group):
        tasks = _tasks(call, schedule, group, tools)
        by_query, by_key = _spans(kernel, tasks)
        of_keys = shares(by_key, work.n_keys)
        held = (shares(by_query, work.n_queries), of_keys, of_keys)
        targets = [group_part(t, group, axis) for t, axis in zip(grads, AXES, strict=True)]
        states = [
            torch.empty(
                (1, t.shape[1], h.n_shared, t.shape[3]), dtype=work.state_dtype, device=call.device
            )
            for t, h in zip(targets, held, strict=True)
        ]
        upstream, result = (
            operand(group_part(t, group, "query"), work.dtype) for t in (grad_out, out)
        )
        row_lse = group_part(lse, group, "query")
        for number, task in enumerate(tasks):
            every = [h.tasks[number] for h in held]
            if every[0]:
                with tools.clock.timed("compute"):
                    parts = kernel.task_backward(task, upstream, result, row_lse)
                    with tools.clock.timed("merge"):
                        for index in range(3):
                            _add(states[index], parts[index], every[index])
                with tools.clock.timed("scatter"):
                    for index in range(3):
                        _put(targets[index], parts[index], states[index], every[index])
                del parts
            steps.done()
        for target, h in zip(targets, held, strict=True):
            for here in h.nobody:
                target[:, :, here] = 0.0
        del states, upstream, result
        yield


class _Steps:
    """Tells of every task that is done."""

    def __init__(
        self, work: Workload, schedule: Schedule, progress: Progress | None, label: str
    ) -> None:
        self.total = count_groups(work, schedule.group) * schedule.decomposition.n_tasks
        self.progress, self.label, self.count = progress, label, 0

    def done(self) -> None:
        self.count += 1
        if self.progress is not None:
            self.progress(self.count, self.total, self.label)


def _spans(
    kernel: TaskCalls, tasks: list[TaskTensors]
) -> tuple[list[tuple[int, int] | None], list[tuple[int, int] | None]]:
    """Of every task the queries and the keys that a call of it takes."""
    found = [kernel.task_span(task) for task in tasks]
    return (
        [None if one is None else (one[0].start, one[0].stop) for one in found],
        [None if one is None else (one[1].start, one[1].stop) for one in found],
    )


def as_they_lie(
    call: Call,
    schedule: Schedule,
    group: Group,
    tools: Tools,
    task: Task,
    rectangles: tuple[Rectangle, ...],
) -> TaskTensors:
    """Rectangles of the whole sequence, on a head group's part of the inputs."""
    return TaskTensors(
        task=task,
        rectangles=rectangles,
        query=group_part(call.query, group, "query"),
        key=group_part(call.key, group, "key"),
        value=group_part(call.value, group, "key"),
        scale=call.scale,
        is_causal=call.work.is_causal,
        bias=no_bias,
        max_queries=schedule.max_queries,
        max_keys=schedule.max_keys,
        timed=tools.clock.timed,
        lanes=tools.lanes,
        first_head=group.query_heads.start,
        entries=flat_entries(call.work, group),
    )


def _tasks(call: Call, schedule: Schedule, group: Group, tools: Tools) -> list[TaskTensors]:
    whole, every = rectangles_in_place(call.work, schedule.decomposition)
    one = as_they_lie(call, schedule, group, tools, whole, ())
    return [replace(one, rectangles=rectangles) for rectangles in every]


# Functions of their own, so that no view of a part outlives it.


def _merge(
    state: torch.Tensor,
    state_lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    pieces: tuple[Piece, ...],
) -> None:
    for piece in pieces:
        there = (state[:, :, piece.state], state_lse[:, :, piece.state])
        mine = (part[:, :, piece.part], part_lse[:, :, piece.part])
        if piece.holder == "first":
            there[0].copy_(mine[0])
            there[1].copy_(mine[1])
        elif piece.holder != "only":
            merge_(*there, *mine)


def _add(state: torch.Tensor, part: torch.Tensor, pieces: tuple[Piece, ...]) -> None:
    for piece in pieces:
        there, mine = state[:, :, piece.state], part[:, :, piece.part]
        if piece.holder == "first":
            there.copy_(mine)
        elif piece.holder != "only":
            add_(there, mine)


def _put(
    target: torch.Tensor, part: torch.Tensor, state: torch.Tensor, pieces: tuple[Piece, ...]
) -> None:
    """What is final now: rows that only this task has, and those that no later one has."""
    for piece in pieces:
        if piece.holder == "only":
            copy_on_device(target[:, :, piece.rows], part[:, :, piece.part])
        elif piece.holder == "last":
            target[:, :, piece.rows].copy_(state[:, :, piece.state])
