"""The route ``in_place``: one task after the other, on inputs that are on the computing device.

It needs a kernel that computes a task in one launch (``task_calls``). The kernel reads the task's
part of the inputs where it lies, and returns new tensors. Rows that only this task has are copied
from them straight to the results. Rows that several tasks have are merged in a state first. So
there are no slots and no copies of inputs, and under a sparse mask hardly any rows are merged.

The route ``together``: all tasks of a head group at once, over the inputs as they lie.

All tasks of a level together keep every pair once. If the inputs are on the computing device and
the state of a whole head group fits beside them, the tasks need not run one by one: the whole
sequence is cut into rectangles as a single task would be. These are fewer and larger than those of
the tasks, and are read and merged in place, so far fewer kernel calls are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product, starmap
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.decomposition.pieces import Pieces, largest_chunk, pieces_of
from quorum_attention.execution.case import (
    Bytes,
    Case,
    Load,
    bytes_before,
    copied_bytes,
    final_bytes,
    in_results,
    moved_bytes,
    result_bytes,
    state_bytes,
)
from quorum_attention.execution.control.machine import HERE, Machine
from quorum_attention.execution.job import Job, Tools
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.row_owners import HeldRows, row_owners
from quorum_attention.execution.scaling import Ask, Computed, Steps, asking, scales
from quorum_attention.execution.schedule import Choice, Route, Schedule
from quorum_attention.execution.trimming import Tally
from quorum_attention.execution.workload import (
    Axis,
    Group,
    GroupSize,
    Workload,
    count_groups,
    group_part,
)
from quorum_attention.kernels.merge import join_sinks_
from quorum_attention.kernels.protocol import InnerKernel, TaskTensors
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.tensors import copy_on_device


def all_rectangles(
    work: Workload, shape: Decomposition, pieces: Pieces = "halves"
) -> tuple[Task, tuple[Rectangle, ...]]:
    """The whole sequence as one task, and rectangles of it that hold every pair of a call."""
    return pieces_of(shape, pieces, work.is_causal, work.n_queries, work.n_keys)


@dataclass(frozen=True, slots=True)
class OverInputs(Route):
    """A route of several tasks over the inputs as they lie. A head group has one batch entry."""

    recovery = "inputs in place: out of memory", "through slots"

    def check(self, shape: Decomposition, group: GroupSize) -> None:
        """Refuse a decomposition without levels, and a head group of several batch entries."""
        if not shape.depth:
            raise ValueError("there is nothing to merge of one whole call")
        if group.batch != 1:
            raise ValueError(f"a head group has to be of one batch entry, got {group.batch}")

    def limits(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """Most queries and most keys of the rectangles of all tasks together."""
        _, rectangles = all_rectangles(work, shape)
        return (
            max((r.n_queries for r in rectangles), default=1),
            max((r.n_keys for r in rectangles), default=1),
        )

    def runs(self, schedule: Schedule, case: Case) -> bool:
        """Whether all inputs can be read where they lie, and the call has no mask."""
        return case.work.mask is None and case.place.in_place and case.place.lse_here

    def results(self, schedule: Schedule, case: Case) -> tuple[int, ...]:
        """Bytes of the results, and of the copies of inputs that a pass makes."""
        rows = self.rows_copied(schedule, case)
        copied = copied_bytes(case, schedule.group, rows)
        return *bytes_before(case), *copied, *result_bytes(case)

    def rows_copied(self, schedule: Schedule, case: Case) -> int | None:
        """Most rows of a head that are copied at a time where operators cannot read an input; None:
        all rows of a head group."""
        return None

    def fallback(self, schedule: Schedule, work: Workload) -> Schedule:
        """The same tasks through slots."""
        return schedule.through_slots(work)


# At least the bytes of each small tensor that a scaled backward makes for a head group.
_SMALL_BYTES = 512


@dataclass(frozen=True, slots=True)
class Together(OverInputs):
    """All tasks of a head group as one.

    Attributes:
        streams: kernel calls in flight at once.
        pieces: how their rectangles are laid out.
    """

    streams: int = 1
    pieces: Pieces = "halves"

    words = "inputs in place, all tasks of a head group at once"

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise ValueError(f"streams must be at least 1, got {self.streams}")

    @classmethod
    def offered(cls, choice: Choice) -> Iterator[Together]:
        """Those that a search tries: every combination."""
        return starmap(cls, product(choice.streams, choice.pieces))

    def limits(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """Halved rectangles are as they come; others have a chunk of queries, or of both."""
        if self.pieces == "halves":
            return OverInputs.limits(self, shape, work)
        chunk = largest_chunk(shape)
        keys = chunk if self.pieces == "blocks" else work.n_keys
        return min(chunk, work.n_queries), min(keys, work.n_keys)

    def runs(self, schedule: Schedule, case: Case) -> bool:
        """Whether all inputs can be read where they lie. Under a mask only small rectangles are
        of use: each has a part of the mask in the inputs' dtype."""
        maskless = case.work.mask is None or self.pieces != "halves"
        return maskless and case.place.in_place and case.place.lse_here

    def takes(self, schedule: Schedule, case: Case) -> Bytes:
        """The states of one head group, and the results of all."""
        states = scaled_bytes if case.scaled else merged_bytes
        return Bytes(
            self.streams * case.workspace(schedule.extent(case.work)),
            0,
            (*states(case, schedule.group), *final_bytes(case)),
            self.results(schedule, case),
        )

    def rows_copied(self, schedule: Schedule, case: Case) -> int | None:
        """The rows of a rectangle, if rectangles are small and the kernel copies by itself."""
        small = self.pieces != "halves" and case.kernel.any_upstream
        return schedule.max_queries if small else None

    def load(self, schedule: Schedule, case: Case) -> Load:
        """Each head group is one unit."""
        units = count_groups(case.work, schedule.group)
        return Load(units=units, at_once=self.pieces, begun=units)

    def slots(self, **changes: Any) -> Slots:
        """One slot, with as many calls in flight."""
        return Slots(1, "device", self.streams).slots(**changes)

    def run(self, job: Job, schedule: Schedule, machine: Machine, tools: Tools) -> Iterator[int]:
        """Compute the head groups that are left, one after the other."""
        job.results.make()
        task, rectangles = all_rectangles(job.call.work, schedule.decomposition, self.pieces)
        every = len(machine.groups_left)
        for done, group in enumerate(machine.whole_groups(HERE), start=1):
            tensors = job.task_in_place(schedule.limits, group, tools, task, rectangles)
            copied = self.rows_copied(schedule, job.case) is None
            ask = asking(machine, group)
            job.repeated(compute_group(job, tensors, group, tools, ask, copied=copied))
            job.tell(done, every)
            yield schedule.decomposition.n_tasks


def merged_bytes(case: Case, group: GroupSize) -> tuple[int, ...]:
    """Bytes of the states that ``compute_group`` allocates."""
    return () if in_results(case) else state_bytes(case, group)


def scaled_bytes(case: Case, group: GroupSize) -> tuple[int, ...]:
    """Bytes of what ``compute_group`` allocates where it is scaled: the states, a copy of the input
    that is divided, and a few numbers for every head."""
    spec, work = case.spec, case.work
    divided = next(item for item in spec.inputs if item.name == spec.divided)
    copy = divided.count(work, group) * work.element_bytes
    return (*merged_bytes(case, group), copy, *(_SMALL_BYTES,) * 4)


def _begun(target: torch.Tensor, fill: float | torch.Tensor) -> torch.Tensor:
    """``target``, filled; where each head begins otherwise, it is (1, h, rows)."""
    return target.copy_(fill.squeeze(-1)) if isinstance(fill, torch.Tensor) else target.fill_(fill)


def compute_group(
    job: Job, task: TaskTensors, group: Group, tools: Tools, ask: Ask, *, copied: bool = True
) -> int:
    """Compute a head group and write its results.

    Args:
        task: all of the head group.
        ask: decides whether a scaled group that overflowed runs again (execution/scaling.py).
        copied: whether to copy inputs that operators cannot read; if not, the kernel does.

    Returns:
        How often it was run again.
    """
    call, work, spec = job.call, job.call.work, job.spec
    given = job.operands(group, copied=copied)
    divided = spec.divided if job.scaled else None
    upstream = None if divided is None else given[divided]
    if divided is not None and upstream is not None:
        given[divided] = torch.empty(upstream.shape, dtype=work.dtype, device=call.device)
    targets = [
        group_part(result, group, state.axis)
        for state, result in zip(spec.states, job.results.make(), strict=True)
    ]
    own = in_results(job.case)
    states = [
        # A result in the state's dtype is its own state.
        _begun(target, job.fill(state, group))
        if state.over is None or own
        else torch.zeros(target.shape, dtype=work.state_dtype, device=call.device)
        for state, target in zip(spec.states, targets, strict=True)
    ]
    scaling, steps, repeated = Scaling(), Steps(work.n_keys), 0
    while True:
        if divided is not None and upstream is not None:
            with tools.clock.timed("gather"):
                sizes = task.value.shape[:2]
                unscale = torch.empty(sizes, dtype=torch.float32, device=call.device)
                overflow = torch.zeros(sizes, dtype=torch.int32, device=call.device)
                copy_on_device(given[divided], upstream)
                steps.divide_(given[divided], task.value, unscale)
            scaling = Scaling(steps.shift, unscale, overflow)
        with tools.clock.timed("compute"):
            spec.accumulate(call.kernel, task, given, states, scaling)
        if upstream is None or scaling.overflow is None or not bool(scaling.overflow.any()):
            break
        computed = Computed(
            task.query, given["out"], upstream, given["lse"].unsqueeze(-1), task.key, task.value,
            *states,
        )  # fmt: skip
        if not steps.lower(scaling.overflow, computed, ask):
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
                if not own:
                    target.copy_(made)
    return repeated


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
            axis: row_owners(spans, lengths[axis])
            for axis, spans in _spans(self.kernel, tasks).items()
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
