"""Routes over the inputs as they lie, on the computing device: no slots and no copies of inputs.

``Whole`` is one kernel call for each head group, or for all of them together; nothing is merged.

``Blockwise`` computes all tasks of a head group at once. All tasks of a level together keep every
pair once. If the state of a whole head group fits beside the inputs, the whole sequence is cut into
rectangles as a single task would be. These are fewer and larger than those of the tasks, and are
read and merged in place, so far fewer kernel calls are made.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.decomposition.layouts import Pieces, pieces_of
from quorum_attention.execution.call import Job, Tools, as_kernel_readable, flatten_batch
from quorum_attention.execution.control.controller import RecoveryController
from quorum_attention.execution.problem import (
    Footprint,
    Group,
    GroupSize,
    Problem,
    WorkCounts,
    copied_bytes,
    count_groups,
    final_bytes,
    group_part,
    groups,
    in_results,
    result_bytes,
    state_bytes,
)
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.scaling import (
    SMALL_BYTES,
    BackwardScaling,
    all_finite,
    what_is_read,
)
from quorum_attention.execution.schedule import Route, Schedule
from quorum_attention.kernels.merge import join_sinks_
from quorum_attention.kernels.protocol import Call, CallShape, Saved, TaskTensors
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.tensors import copy_on_device
from quorum_attention.kernels.torch_private import capturing


def all_rectangles(
    shape: CallShape, decomposition: Decomposition, pieces: Pieces = "halves"
) -> tuple[Task, tuple[Rectangle, ...]]:
    """The whole sequence as one task, and rectangles of it that hold every pair of a call."""
    return pieces_of(decomposition, pieces, shape.is_causal, shape.n_queries, shape.n_keys)


@dataclass(frozen=True, slots=True)
class InPlace(Route):
    """A route over the inputs as they lie."""

    def slots(self, **changes: Any) -> Slots:
        """Slots with the same fields, changed."""
        fields = (self.n_cap, self.accumulator, self.streams, self.trimmed)
        return replace(Slots(*fields), **changes)

    @abstractmethod
    def compute(self, job: Job, schedule: Schedule, group: Group, tools: Tools) -> Iterator[int]:
        """Compute a head group; yields how many of its tasks are done."""

    def run(
        self, job: Job, schedule: Schedule, controller: RecoveryController, tools: Tools
    ) -> Iterator[int]:
        """Compute the head groups that are left, one after the other."""
        done, every = 0, len(controller.groups_left) * schedule.decomposition.n_tasks
        for group in controller.whole_groups():
            for tasks in self.compute(job, schedule, group, tools):
                done += tasks
                job.report_progress(done, every)
                yield tasks


# --- One kernel call for each head group ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Whole(InPlace):
    """One kernel call for each head group, or for all of them together; no sequence is cut."""

    words = "inputs in place, nothing to merge"
    recovery = "monolithic call out of memory", "depth 0 -> 1"
    accumulators = "none"
    measured = False

    def limits(self, decomposition: Decomposition, shape: CallShape) -> tuple[int, int]:
        """All queries and all keys: there is one rectangle."""
        return shape.n_queries, shape.n_keys

    def runs(self, schedule: Schedule, problem: Problem) -> bool:
        """Whether one kernel call can take all of a head group and give its results."""
        shape = problem.shape
        if not problem.place.in_place or (problem.spec.backward and not _gives_results(problem)):
            return False
        every = _is_one_call(schedule, problem)
        if not problem.kernel.takes_whole(problem.call_shape, shape.n_tokens, every):
            return False
        # One rectangle has to hold all queries and keys. With more keys than queries a causal one
        # leaves keys out, and operators differ on what they do with those.
        _, rectangles = all_rectangles(shape, schedule.decomposition)
        return [(r.n_queries, r.n_keys) for r in rectangles] == [(shape.n_queries, shape.n_keys)]

    def memory_use(self, schedule: Schedule, problem: Problem) -> Footprint:
        """Results take nothing more where the kernel's own are returned: those of all head groups
        in one call, in the right dtype."""
        shape = problem.shape
        workspace = problem.workspace(replace(schedule.extent(shape), direct=True))
        accumulators: list[int] = []
        for item in problem.spec.inputs:
            if item.of_state:
                # The lse: two copies with -inf replaced, and the mask that finds it.
                size = item.count(shape) * shape.state_dtype.itemsize
                accumulators += [size, size, item.count(shape)]
        if problem.scaled:
            # If the kernel's gradients are not finite, they are computed again head by head.
            one = replace(schedule, group=GroupSize(1, 1))
            accumulators += allocated_bytes(problem, one.group)
            workspace = max(workspace, problem.workspace(one.extent(shape)))
        results = result_bytes(problem)
        if not schedule.is_all(shape):
            results += final_bytes(problem)
        elif problem.place.result_dtype == shape.dtype and not (
            problem.scaled or _widened(problem)
        ):
            results = ()
        given = (problem.place.rescaled_grad_bytes or 0, *copied_bytes(problem, schedule.group))
        if _is_one_call(schedule, problem) and not problem.place.flattenable:
            given += tuple(i.count(shape) * i.dtype(shape).itemsize for i in problem.spec.inputs)
        return Footprint(
            problem.shape.device_type, workspace, 0, tuple(accumulators), (*given, *results)
        )

    def work_counts(self, schedule: Schedule, problem: Problem) -> WorkCounts:
        """Kernel calls, and nothing else."""
        units = count_groups(problem.shape, schedule.group)
        return WorkCounts(units=units, uncut=True, merges=False)

    def fallback(self, schedule: Schedule, shape: CallShape) -> Schedule:
        """One level of tasks, through one slot."""
        return schedule.deeper(shape).changed(n_cap=1)

    def groups(self, job: Job, schedule: Schedule) -> list[Group]:
        """One for each kernel call.

        Those of several batch dimensions, if they are not one call, have entries along the last of
        these dimensions: such a run is a view.
        """
        shape, size = job.shape, schedule.group
        if len(shape.batch_shape) > 1 and not _is_one_call(schedule, job.problem):
            size = replace(size, batch=_largest_divisor(shape.batch_shape[-1], size.batch))
        return list(groups(shape, size))

    def compute(self, job: Job, schedule: Schedule, group: Group, tools: Tools) -> Iterator[int]:
        """One kernel call; the scaled backward, head by head, where its gradients overflow."""
        shape = job.shape
        task, (rectangle,) = all_rectangles(shape, schedule.decomposition)
        alone = None if _is_one_call(schedule, job.problem) else group
        bias: torch.Tensor | None
        if alone is None and job.bias is not None:
            bias = job.bias.whole(shape.bias_dtype, job.device, shape.batch_shape)
        else:
            bias = job.bias_of(group, task)(rectangle)
        parts = _of_call(job, alone, rectangle.causal, bias)
        if parts is None:
            job.count_repeats(1)
            _scaled(job, schedule, group, tools)
        elif alone is None:
            job.store_results(parts)
        else:
            for target, part in zip(job.targets(group), parts, strict=True):
                target.copy_(part)
        yield 1


# A kernel call takes the host about as long as copying so many bytes, there or on a GPU.
_HOST_CALL_BYTES, _DEVICE_CALL_BYTES = 1 << 20, 64 << 20


def _is_one_call(schedule: Schedule, problem: Problem) -> bool:
    """Whether a head group is the whole call, in one kernel call. Inputs that have no view
    (b, heads, n, d) are copied, if that takes less than a call for each run of entries along the
    last batch dimension."""
    shape = problem.shape
    if not schedule.is_all(shape):
        return False
    if problem.place.flattenable:
        return True
    numbers = sum(item.count(shape) for item in problem.spec.inputs)
    n_runs = max(1, math.prod(shape.batch_shape[:-1]))
    call_bytes = _DEVICE_CALL_BYTES if problem.backend.own_memory else _HOST_CALL_BYTES
    return numbers * shape.dtype.itemsize <= call_bytes * n_runs


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def _widened(problem: Problem) -> bool:
    """Whether a kernel is asked for an output in the state's dtype, which is then rounded."""
    shape = problem.shape
    return shape.sinks and not problem.spec.backward and shape.dtype != shape.state_dtype


def _gives_results(problem: Problem) -> bool:
    """Whether the kernel's gradients can be the results as they are.

    They cannot if the gradient is divided, or if a backward that has to be scaled returns more than
    the kernel's 16 bits.
    """
    exact = problem.place.result_dtype == problem.shape.dtype or not problem.scaled
    return exact and problem.place.rescaled_grad_bytes is None


def single_kernel_call(job: Job) -> tuple[torch.Tensor, ...] | None:
    """Computes a call by one kernel call without a schedule, for calls so short that making one
    would take longer.

    Args:
        job: with at most one batch dimension, and an upstream gradient in the inputs' dtype.

    Returns:
        The results; None if gradients of 16 bits are not finite, and may have to be scaled or kept
        to rows of their own.
    """
    mask = None if job.bias is None else job.bias.whole(job.shape.bias_dtype, job.device)
    parts = _of_call(job, None, job.shape.is_causal, mask)
    return None if parts is None else job.store_results(parts)


def _of_call(
    job: Job, group: Group | None, causal: bool, bias: torch.Tensor | None
) -> tuple[torch.Tensor, ...] | None:
    """One kernel call: the results of ``group``, or of the whole call for None.

    Returns:
        None if gradients that may have to be scaled are not finite.
    """
    problem, given = job.problem, job.tensors
    shape, backward, kernel = problem.shape, problem.spec.backward, problem.kernel
    if group is not None:
        axes = {item.name: item.axis for item in problem.spec.inputs}
        given = {name: group_part(t, group, axes[name]) for name, t in given.items()}
    elif len(shape.batch_shape) != 1:
        given = {name: flatten_batch(t, shape) for name, t in given.items()}
    dropout = job.dropout if group is None else job.dropout_of(group)
    joins = not backward and job.sinks is not None
    one = Call(
        given["query"], given["key"], given["value"], causal, job.scale, bias,
        # Unrounded where the kernel can, because the sinks come after.
        shape.state_dtype if joins else problem.place.result_dtype, dropout,
        first_entry=0 if group is None else group.entry_numbers.start,
    )  # fmt: skip
    parts: tuple[torch.Tensor, ...]
    if not backward:
        parts = kernel.whole_forward(one)
    else:
        lse = given["lse"].to(job.device)
        lse = lse if kernel.accepts_inf_lse else without_empty_rows(lse)
        grad_out, out = (
            as_kernel_readable(given["grad_out"], shape.dtype),
            as_kernel_readable(given["out"], shape.dtype),
        )
        parts = kernel.whole_backward(one, Saved(grad_out, out, lse))
    if joins and job.sinks is not None:
        sinks = job.sinks if group is None else job.sinks[group.query_heads]
        join_sinks_(parts[0], parts[1], sinks)
    if problem.scaled and not capturing(job.device) and not all_finite(parts):
        return None
    return parts


def without_empty_rows(lse: torch.Tensor) -> torch.Tensor:
    """``lse`` as operators take it."""
    # A row without keys has scores -inf and lse -inf. With lse 0 instead, exp(score - lse) is 0,
    # not NaN.
    return lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)


def _scaled(job: Job, schedule: Schedule, group: Group, tools: Tools) -> None:
    """Compute a head group by the scaled backward, head by head."""
    # Where the forward's state was in host memory, so is its lse.
    here = job.tensors["lse"].to(job.device)
    job = replace(job, tensors={**job.tensors, "lse": here})
    task, rectangles = all_rectangles(job.shape, schedule.decomposition)
    job.make_results()
    for entry in _single_entries(group):
        for head in range(group.kv_start, group.kv_stop):
            one = replace(group, entry_numbers=entry, kv_start=head, kv_stop=head + 1)
            tensors = job.task(schedule.limits, one, tools, task, rectangles)
            compute_group(job, tensors, one, tools)


def _single_entries(group: Group) -> Iterator[range]:
    """The numbers of the batch entries of a head group, one at a time."""
    for number in group.entry_numbers:
        yield range(number, number + 1)


# --- All tasks at once ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blockwise(InPlace):
    """All tasks of a head group, which has one batch entry, as one.

    Attributes:
        pieces: how their rectangles are laid out.
    """

    pieces: Pieces = "halves"

    words = "inputs in place, all tasks of a head group at once"
    recovery = "inputs in place: out of memory", "through slots"

    def limits(self, decomposition: Decomposition, shape: CallShape) -> tuple[int, int]:
        """Halved rectangles are as they come; others have a chunk of queries, or of both."""
        if self.pieces == "halves":
            _, rectangles = all_rectangles(shape, decomposition)
            return (
                max((r.n_queries for r in rectangles), default=1),
                max((r.n_keys for r in rectangles), default=1),
            )
        chunk = decomposition.chunk_tokens
        keys = chunk if self.pieces == "blocks" else shape.n_keys
        return min(chunk, shape.n_queries), min(keys, shape.n_keys)

    def runs(self, schedule: Schedule, problem: Problem) -> bool:
        """Whether all inputs can be read where they lie. Under a mask only small rectangles are
        of use: each may have a copy of its part of the mask."""
        maskless = problem.shape.bias is None or self.pieces != "halves"
        return maskless and problem.place.in_place and problem.place.lse_here

    def memory_use(self, schedule: Schedule, problem: Problem) -> Footprint:
        """The states of one head group, the results of all, and the copies of inputs."""
        rows = schedule.max_queries if self._copied_by_kernel(problem) else None
        copied = copied_bytes(problem, schedule.group, rows)
        return Footprint(
            problem.shape.device_type,
            self.streams * problem.workspace(schedule.extent(problem.shape)),
            0,
            (*allocated_bytes(problem, schedule.group), *final_bytes(problem)),
            (problem.place.rescaled_grad_bytes or 0, *copied, *result_bytes(problem)),
        )

    def _copied_by_kernel(self, problem: Problem) -> bool:
        """Whether the kernel copies inputs that operators cannot read, a rectangle at a time; if
        not, a head group's are copied beforehand."""
        return self.pieces != "halves" and problem.kernel.any_upstream

    def work_counts(self, schedule: Schedule, problem: Problem) -> WorkCounts:
        """Each head group is one unit."""
        units = count_groups(problem.shape, schedule.group)
        return WorkCounts(units=units, pieces=self.pieces)

    def compute(self, job: Job, schedule: Schedule, group: Group, tools: Tools) -> Iterator[int]:
        """All tasks as one."""
        job.make_results()
        task, rectangles = all_rectangles(job.shape, schedule.decomposition, self.pieces)
        tensors = job.task(schedule.limits, group, tools, task, rectangles)
        copied = not self._copied_by_kernel(job.problem)
        compute_group(job, tensors, group, tools, copied=copied)
        yield schedule.decomposition.n_tasks


def allocated_bytes(problem: Problem, group: GroupSize) -> tuple[int, ...]:
    """Bytes of what ``compute_group`` allocates: the states; where it is scaled, a copy of the
    input that is divided, and a few numbers for every head."""
    states = () if in_results(problem) else state_bytes(problem, group)
    if not problem.scaled:
        return states
    divided = next(item for item in problem.spec.inputs if item.name == problem.spec.rescaled_input)
    copy = divided.count(problem.shape, group) * problem.shape.dtype.itemsize
    return (*states, copy, *(SMALL_BYTES,) * 4)


def _begun(target: torch.Tensor, fill: float | torch.Tensor) -> torch.Tensor:
    """``target``, filled; where each head begins otherwise, it is (1, h, rows)."""
    return target.copy_(fill.squeeze(-1)) if isinstance(fill, torch.Tensor) else target.fill_(fill)


def compute_group(
    job: Job, task: TaskTensors, group: Group, tools: Tools, *, copied: bool = True
) -> None:
    """Compute a head group and write its results.

    Args:
        task: all of the head group.
        copied: whether to copy inputs that operators cannot read; if not, the kernel does.
    """
    shape, spec = job.shape, job.spec
    divides = spec.rescaled_input if job.problem.scaled else None
    # An input that is divided is not copied: dividing it makes a copy anyway.
    given = {i.name: job.read(i, group, copied and i.name != divides) for i in spec.inputs[3:]}
    scaling = upstream = None
    if divides is not None:
        upstream = given[divides]
        divided = given[divides] = torch.empty(upstream.shape, dtype=shape.dtype, device=job.device)
        scaling = BackwardScaling(shape, job.device, (task.value.shape[0], task.value.shape[1]))
    targets = job.targets(group)
    own = in_results(job.problem)
    states = [
        # A result in the state's dtype is its own state.
        _begun(target, job.fill(state, group))
        if state.over is None or own
        else torch.zeros(target.shape, dtype=shape.state_dtype, device=job.device)
        for state, target in zip(spec.states, targets, strict=True)
    ]
    runs = (0,) if scaling is None else scaling.runs(lambda: what_is_read(job.tensors, group))
    for again in runs:
        how = Scaling()
        if again:
            job.count_repeats(1)
            for state in states:
                state.zero_()
        if scaling is not None and upstream is not None:
            with tools.clock.timed("gather"):
                copy_on_device(divided, upstream)
                how = scaling.divide_(divided, task.value)
        with tools.clock.timed("compute"):
            spec.accumulate(job.kernel, task, given, states, how)
    with tools.clock.timed("scatter"):
        for spec_of_state, target, made in zip(spec.states, targets, states, strict=True):
            if spec_of_state.over is not None:
                factor = job.factor(group, spec_of_state.axis)
                if factor is not None:
                    made.mul_(factor)
                if not own:
                    target.copy_(made)
