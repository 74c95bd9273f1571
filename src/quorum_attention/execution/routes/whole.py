"""The route ``whole``: one kernel call on the inputs as they lie, or one for each head group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution import call as execution
from quorum_attention.execution.call import flat_batch, operand
from quorum_attention.execution.case import (
    Bytes,
    Case,
    Load,
    bytes_before,
    copied_bytes,
    corrected_bytes,
    final_bytes,
    result_bytes,
)
from quorum_attention.execution.control.machine import HERE, Machine
from quorum_attention.execution.device.residency import Home
from quorum_attention.execution.job import Job, Tools
from quorum_attention.execution.routes.in_place import all_rectangles, compute_group, scaled_bytes
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.scaling import all_finite, asking
from quorum_attention.execution.schedule import Route, Schedule
from quorum_attention.execution.workload import (
    Group,
    GroupSize,
    Workload,
    count_groups,
    group_part,
    groups,
)
from quorum_attention.kernels.merge import join_sinks_
from quorum_attention.kernels.protocol import Call, InnerKernel, Saved
from quorum_attention.kernels.reference import SMALL, backward_bytes, exact_carrier, whole_backward
from quorum_attention.kernels.torch_private import capturing


@dataclass(frozen=True, slots=True)
class Whole(Route):
    """One kernel call for each head group, or for all of them together; no sequence is cut.

    Attributes:
        otherwise: the slots that the pass goes through where it cannot run this way.
    """

    otherwise: Slots = field(default_factory=Slots)

    words = "inputs in place, nothing to merge"
    recovery = "monolithic call out of memory", "depth 0 -> 1"
    accumulators = "none"
    measured = False

    @property
    def n_cap(self) -> int:
        """Slots of ``otherwise``."""
        return self.otherwise.n_cap

    @property
    def accumulator(self) -> Home:
        """Where the travelling state of ``otherwise`` lives."""
        return self.otherwise.accumulator

    def check(self, shape: Decomposition, group: GroupSize) -> None:
        """Refuse a decomposition into several tasks."""
        if shape.depth:
            raise ValueError(f"levels {shape.levels} are not one whole call")

    def limits(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """All queries and all keys: there is one rectangle."""
        return work.n_queries, work.n_keys

    def runs(self, schedule: Schedule, case: Case) -> bool:
        """Whether one kernel call can take all of a head group and give its results."""
        work = case.work
        if not case.place.in_place or (case.spec.backward and not _gives_results(case)):
            return False
        # With several batch dimensions a tensor may have no view (b, heads, n, d).
        every = schedule.is_all(work) and len(work.batch_shape) <= 1
        if not case.kernel.takes_whole(
            work.heads, work.kv_heads, work.n_tokens, work.mask is not None, every
        ):
            return False
        # One rectangle has to hold all queries and keys. With more keys than queries a causal one
        # leaves keys out, and operators differ on what they do with those.
        _, rectangles = all_rectangles(work, schedule.decomposition)
        return [(r.n_queries, r.n_keys) for r in rectangles] == [(work.n_queries, work.n_keys)]

    def takes(self, schedule: Schedule, case: Case) -> Bytes:
        """Results take nothing more where the kernel's own are returned: those of all head groups
        in one call, in the right dtype."""
        work = case.work
        workspace = case.workspace(replace(schedule.extent(work), direct=True))
        accumulators: list[int] = []
        for item in case.spec.inputs:
            if item.of_state:
                # The lse: two copies with -inf replaced, and the mask that finds it.
                size = item.count(work) * work.state_dtype.itemsize
                accumulators += [size, size, item.count(work)]
        exactly = case.spec.backward and _exactly(work, case.kernel)
        if exactly:
            extent = replace(schedule.extent(work), direct=True)
            workspace = max(workspace, backward_bytes(case.call_shape, extent, SMALL))
        if case.scaled:
            # If the kernel's gradients are not finite, they are computed again head by head.
            one = replace(schedule, group=GroupSize(1, 1))
            accumulators += scaled_bytes(case, one.group)
            workspace = max(workspace, case.workspace(one.extent(work)))
        results = result_bytes(case)
        if not schedule.is_all(work):
            results += final_bytes(case)
        elif case.place.result_dtype == work.dtype and not (
            case.scaled or exactly or _widened(case)
        ):
            results = ()
        given = (*bytes_before(case), *copied_bytes(case, schedule.group))
        return Bytes(workspace, 0, tuple(accumulators), (*given, *results))

    def load(self, schedule: Schedule, case: Case) -> Load:
        """Kernel calls, and nothing else."""
        units = count_groups(case.work, schedule.group)
        return Load(units=units, uncut=True, merges=False)

    def slots(self, **changes: Any) -> Slots:
        """Those of ``otherwise``."""
        return self.otherwise.slots(**changes)

    def fallback(self, schedule: Schedule, work: Workload) -> Schedule:
        """One level of tasks, through one slot."""
        return schedule.deeper(work).changed(n_cap=1)

    def groups(self, job: Job, schedule: Schedule) -> list[Group]:
        """One for each kernel call.

        If an input has no view (b, heads, n, d), there is at least one for each batch entry.
        """
        work = job.call.work
        rows = (job.tensors[item.name] for item in job.spec.inputs if item.width != "one")
        size = schedule.group
        if not schedule.is_all(work) or any(flat_batch(t) is None for t in rows):
            size = replace(size, batch=1)
        return list(groups(work, size))

    def run(self, job: Job, schedule: Schedule, machine: Machine, tools: Tools) -> Iterator[int]:
        """Compute the head groups that are left, one kernel call each."""
        call, work = job.call, job.call.work
        task, (rectangle,) = all_rectangles(work, schedule.decomposition)
        every = next(groups(work, GroupSize(work.batch, work.kv_heads)))
        lse = job.tensors.get("lse")
        if lse is not None:
            lse = without_empty_rows(lse.to(call.device))
        n_groups = len(machine.groups_left)
        for done, group in enumerate(machine.whole_groups(HERE), start=1):
            alone = None if group == every else group
            bias = job.bias(group, task)(rectangle)
            parts = None
            if alone is None and lse is not None and _exactly(work, call.kernel):
                parts = _materialised(job, lse, bias)
            if parts is None:
                parts = _of_call(job, alone, lse, rectangle.causal, bias)
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
                    # Freed before the next group is computed: the plan counts one group's parts.
                    del part
            del parts
            job.tell(done, n_groups)
            yield 1


def _widened(case: Case) -> bool:
    """Whether a kernel is asked for an output in the state's dtype, which is then rounded."""
    return case.work.sinks and not case.spec.backward and case.work.dtype != case.work.state_dtype


def _gives_results(case: Case) -> bool:
    """Whether the kernel's gradients can be the results as they are.

    They cannot if the gradient is divided, or if a backward that has to be scaled returns more than
    the kernel's 16 bits.
    """
    exact = case.place.result_dtype == case.work.dtype or not case.scaled
    return exact and not case.place.is_divided


def at_once(job: Job) -> tuple[torch.Tensor, ...] | None:
    """Computes a call by one kernel call without a schedule, for calls so short that making one
    would take longer.

    Args:
        job: with at most one batch dimension, and an upstream gradient in the inputs' dtype.

    Returns:
        The results; None if gradients of 16 bits are not finite, and may have to be scaled or kept
        to rows of their own.
    """
    call, lse = job.call, job.tensors.get("lse")
    if lse is not None:
        lse = without_empty_rows(lse)
    mask = None if call.mask is None else call.mask.whole(call.work.dtype, call.device)
    if lse is not None and materialises(call.work, call.kernel):
        parts = _materialised(job, lse, mask)
    else:
        parts = _of_call(job, None, lse, call.work.is_causal, mask)
    return None if parts is None else job.results.take(parts)


def materialises(work: Workload, kernel: InnerKernel) -> bool:
    """Whether ``at_once`` takes the gradients of such a call from materialised scores."""
    if not kernel.small_gradients or work.dropout or work.sinks:
        return False
    # In float64 as large as calls of 16 bits may be.
    narrow = replace(work, dtype=torch.float16) if work.dtype == torch.float64 else work
    return corrected_bytes(narrow, kernel) > 0


def _exactly(work: Workload, kernel: InnerKernel) -> bool:
    """Whether a plan's backward of 16 bits takes its gradients from materialised scores: without a
    plan it would, and a carrier of few columns holds less of delta. Not if
    columns take from delta: what the carrier has of them is in others."""
    return work.dtype.itemsize == 2 and not work.columns and materialises(work, kernel)


def _materialised(
    job: Job, lse: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, ...] | None:
    call, three = job.call, (job.call.query, job.call.key, job.call.value)
    grad_out, out = job.tensors["grad_out"], job.tensors["out"]
    return materialised(call.work, call.scale, grad_out, three, out, lse, bias)


def materialised(
    work: Workload,
    scale: float,
    grad_out: torch.Tensor,
    three: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...] | None:
    """The gradients of ``three`` in a small backward, (b, heads, n, d) each, not rounded; None if
    one is not finite: operators keep NaN to the rows that have it.

    Args:
        lse: 0 in rows without keys.
    """
    query, key, value = [_four(t, work) for t in three]
    call = Call(query, key, value, work.is_causal, scale, bias, lse.dtype)
    saved = Saved(*[_four(t, work) for t in (grad_out, out, lse)])
    parts = whole_backward(call, saved, replace(SMALL, columns=work.columns))
    return parts if all_finite(parts) else None


@torch.no_grad()
def corrected_output(
    call: execution.Call, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """What kernels compute an exact delta from in the place of ``out`` (kernels/reference.py)."""
    work = call.work
    query, key, value = (_four(t, work) for t in (call.query, call.key, call.value))
    mask = call.mask
    bias = None if mask is None else mask.whole(work.dtype, call.device, work.batch_shape)
    one = Call(query, key, value, work.is_causal, call.scale, bias, dropout=call.dropout)
    saved = Saved(*(_four(t, work) for t in (grad_out, out.to(work.dtype), lse.to(out.device))))
    return exact_carrier(one, saved, work.columns).view(out.shape)


def _of_call(
    job: Job,
    group: Group | None,
    lse: torch.Tensor | None,
    causal: bool,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, ...] | None:
    """One kernel call: the results of ``group``, or of the whole call for None.

    Returns:
        None if gradients that may have to be scaled are not finite.
    """
    call, work = job.call, job.call.work
    given = {}
    for item in job.spec.inputs:
        name = item.name
        tensor = lse if name == "lse" and lse is not None else job.tensors[name]
        part = _four(tensor, work) if group is None else group_part(tensor, group, item.axis)
        given[name] = operand(part, work.dtype) if item.copied else part
    dropout = call.dropout if group is None else job.dropout(group)
    joins = not job.spec.backward and call.sinks is not None
    one = Call(
        given["query"], given["key"], given["value"], causal, call.scale, bias,
        # Unrounded where the kernel can, because the sinks come after.
        work.state_dtype if joins else job.results.dtype, dropout,
    )  # fmt: skip
    parts = job.spec.of_call(call.kernel, one, given)
    if joins and call.sinks is not None:
        sinks = call.sinks if group is None else call.sinks[group.query_heads]
        join_sinks_(parts[0], parts[1], sinks)
    if job.scaled and not capturing(call.device) and not all_finite(parts):
        return None
    return parts


def _four(tensor: torch.Tensor, work: Workload) -> torch.Tensor:
    """A view of ``tensor`` (*batch, heads, ...) as (b, heads, ...)."""
    dims = len(work.batch_shape)
    if dims == 1:
        return tensor
    return tensor.reshape(work.batch, *tensor.shape[dims:]) if dims else tensor.unsqueeze(0)


def without_empty_rows(lse: torch.Tensor) -> torch.Tensor:
    """``lse`` as operators take it."""
    # A row without keys has scores -inf and lse -inf. With lse 0 instead, exp(score - lse) is 0,
    # not NaN.
    return lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)


def _scaled(job: Job, schedule: Schedule, group: Group, machine: Machine, tools: Tools) -> None:
    """Compute a head group by the scaled backward, head by head."""
    # Where the forward's state was in host memory, so is its lse.
    here = job.tensors["lse"].to(job.call.device)
    job = replace(job, tensors={**job.tensors, "lse": here})
    task, rectangles = all_rectangles(job.call.work, schedule.decomposition)
    job.results.make()
    for entry in group.entries:
        for head in range(group.kv_start, group.kv_stop):
            one = replace(group, entries=(entry,), kv_start=head, kv_stop=head + 1)
            tensors = job.task_in_place(schedule.limits, one, tools, task, rectangles)
            compute_group(job, tensors, one, tools, asking(machine, group, part=one))
