"""The route of one kernel call for each head group, or for all together; nothing is
merged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.footprint import (
    Footprint,
    copied_bytes,
    final_bytes,
    result_bytes,
)
from quorum_attention.execution.head_groups import (
    Group,
    GroupSize,
    count_groups,
    group_part,
    head_groups,
)
from quorum_attention.execution.job import PassJob
from quorum_attention.execution.kernel_layout import as_kernel_readable, flatten_batch
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.routes.in_place import (
    InPlace,
    all_rectangles,
    allocated_bytes,
    compute_group,
)
from quorum_attention.execution.scaling import all_finite
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.work_counts import WorkCounts
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.operator_call import Call, Saved, Three
from quorum_attention.kernels.sinks import join_sinks_
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.kernels.torch_private import capturing

# A kernel call takes the host about as long as copying so many bytes, there or on a
# GPU.
_HOST_CALL_BYTES = 1 << 20
_DEVICE_CALL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Whole(InPlace):
    """One kernel call for each head group, or for all of them together; no sequence is
    cut."""

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
        if not problem.place.resident:
            return False
        if problem.spec.backward and not _gives_results(problem):
            return False
        one_call = _is_one_call(schedule, problem)
        if not problem.kernel.takes_whole(
            problem.kernel_shape, shape.n_tokens, one_call
        ):
            return False
        # One rectangle has to hold all queries and keys. With more keys than queries a
        # causal one leaves keys out, and operators differ on what they do with those.
        _, rectangles = all_rectangles(shape, schedule.decomposition)
        sizes = [(rectangle.n_queries, rectangle.n_keys) for rectangle in rectangles]
        return sizes == [(shape.n_queries, shape.n_keys)]

    def memory_use(self, schedule: Schedule, problem: Problem) -> Footprint:
        """The workspace, copies of inputs, and results that are not the kernel's
        own."""
        shape = problem.shape
        extent = replace(schedule.extent(shape), direct=True)
        workspace = problem.workspace(extent)
        accumulators: list[int] = []
        for item in problem.spec.inputs:
            if item.has_state_dtype:
                # The lse: two copies with -inf replaced, and the mask that finds it.
                lse_bytes = item.n_bytes(shape)
                accumulators += [lse_bytes, lse_bytes, item.count(shape)]
        if problem.scaled:
            # If the kernel's gradients are not finite, they are computed again head by
            # head.
            head_by_head = replace(schedule, group=GroupSize(1, 1))
            accumulators += allocated_bytes(problem, head_by_head.group)
            head_workspace = problem.workspace(head_by_head.extent(shape))
            workspace = max(workspace, head_workspace)
        copies = [problem.place.rescaled_grad_bytes or 0]
        copies += copied_bytes(problem, schedule.group)
        if _is_one_call(schedule, problem):
            if not problem.place.flattenable:
                copies += [item.n_bytes(shape) for item in problem.spec.inputs]
            if problem.place.copies_query and not problem.spec.backward:
                # The kernel's output, beside the result that lies as the query does.
                copies += result_bytes(problem)
        return Footprint(
            shape.device_type,
            workspace,
            accumulators=tuple(accumulators),
            results=(*copies, *_result_bytes(schedule, problem)),
        )

    def work_counts(self, schedule: Schedule, problem: Problem) -> WorkCounts:
        """Kernel calls, and nothing else."""
        n_units = count_groups(problem.shape, schedule.group)
        return WorkCounts(units=n_units, uncut=True, merges=False)

    def fallback(self, schedule: Schedule, shape: CallShape) -> Schedule:
        """One level of tasks, through one slot."""
        return schedule.deeper(shape).changed(n_cap=1)

    def groups(self, job: PassJob, schedule: Schedule) -> list[Group]:
        """One for each kernel call.

        Those of several batch dimensions, if they are not one call, have entries along
        the last of these dimensions: such a run is a view.
        """
        shape = job.shape
        size = schedule.group
        has_outer_dims = len(shape.batch_shape) > 1
        if has_outer_dims and not _is_one_call(schedule, job.problem):
            n_last_entries = shape.batch_shape[-1]
            n_entries = _largest_divisor(n_last_entries, size.batch)
            size = replace(size, batch=n_entries)
        return list(head_groups(shape, size))

    def compute(self, job: PassJob, schedule: Schedule, group: Group) -> int:
        """One kernel call; the scaled backward, head by head, where its gradients
        overflow."""
        task, (rectangle,) = all_rectangles(job.shape, schedule.decomposition)
        one_call = _is_one_call(schedule, job.problem)
        bias = _call_bias(job) if one_call else job.task_bias(group, task)(rectangle)
        parts = _call_kernel(job, None if one_call else group, rectangle.causal, bias)
        if parts is None:
            job.count_repeat()
            _compute_scaled(job, schedule, group)
        elif one_call:
            job.store_results(parts)
        else:
            for target, part in zip(job.result_parts(group), parts, strict=True):
                target.copy_(part)
        return 1


def single_kernel_call(job: PassJob) -> tuple[torch.Tensor, ...] | None:
    """Computes a call by one kernel call without a schedule, for calls so short that
    making one would take longer.

    Args:
        job: with at most one batch dimension, and an upstream gradient in the inputs'
            dtype.

    Returns:
        The results; None if gradients of 16 bits are not finite, and may have to be
        scaled.
    """
    parts = _call_kernel(job, None, job.problem.shape.is_causal, _call_bias(job))
    return None if parts is None else job.store_results(parts)


def single_call_with_bias_gradient(
    job: PassJob, grad_bias: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Computes a backward by one kernel call that returns the gradient of the bias,
    too.

    Args:
        job: as of ``single_kernel_call``; its backward is not scaled.
        grad_bias: of the mask's shape; filled with that gradient, summed over what the
            mask spans.

    Returns:
        The gradients of query, key and value.
    """
    call = _call_of(job, None, job.tensors, job.shape.is_causal, _call_bias(job))
    saved = _saved_of(job, job.tensors)
    *gradients, grad_scores = job.kernel.whole_backward_with_bias(call, saved)
    _sum_into(grad_bias, grad_scores, job.shape.state_dtype)
    return job.store_results(gradients)


def _sum_into(total: torch.Tensor, scores: torch.Tensor, dtype: torch.dtype) -> None:
    """Write ``scores`` (b, h, n, m) to a tensor that broadcasts to them, summed in
    ``dtype``."""
    n_missing = scores.dim() - total.dim()
    sizes = (1,) * n_missing + tuple(total.shape)
    dims: list[int] = []
    for dim, size in enumerate(sizes):
        if size < scores.shape[dim]:
            dims.append(dim)
    if dims:
        scores = scores.sum(dim=dims, keepdim=True, dtype=dtype)
    total.copy_(scores.reshape(total.shape))


def _is_one_call(schedule: Schedule, problem: Problem) -> bool:
    """Whether a head group is the whole call, in one kernel call. Inputs that have no
    view (b, heads, n, d) are copied, if that takes less than a call for each run of
    entries along the last batch dimension."""
    shape = problem.shape
    if not schedule.is_all(shape):
        return False
    if problem.place.flattenable:
        return True
    n_numbers = 0
    for item in problem.spec.inputs:
        n_numbers += item.count(shape)
    copied_bytes = n_numbers * shape.dtype.itemsize
    outer_sizes = shape.batch_shape[:-1]
    n_runs = math.prod(outer_sizes)
    call_bytes = _DEVICE_CALL_BYTES if problem.backend.own_memory else _HOST_CALL_BYTES
    return copied_bytes <= call_bytes * n_runs


def _largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` that is at most ``limit``."""
    divisor = min(number, limit)
    while number % divisor:
        divisor -= 1
    return divisor


def _result_bytes(schedule: Schedule, problem: Problem) -> tuple[int, ...]:
    """Bytes of the results. The kernel's own tensors take nothing more where they are
    returned: those of all head groups in one call, in the right dtype."""
    shape = problem.shape
    results = result_bytes(problem)
    if not schedule.is_all(shape):
        return results + final_bytes(problem)
    if problem.place.result_dtype != shape.dtype:
        return results
    return results if problem.scaled or _is_widened(problem) else ()


def _is_widened(problem: Problem) -> bool:
    """Whether a kernel is asked for an output in the state's dtype, which is then
    rounded."""
    shape = problem.shape
    if problem.spec.backward or not shape.sinks:
        return False
    return shape.dtype != shape.state_dtype


def _gives_results(problem: Problem) -> bool:
    """Whether the kernel's gradients can be the results as they are.

    They cannot if the gradient is divided, or if a backward that has to be scaled
    returns more than the kernel's 16 bits.
    """
    if problem.place.rescaled_grad_bytes is not None:
        return False
    has_kernel_dtype = problem.place.result_dtype == problem.shape.dtype
    return has_kernel_dtype or not problem.scaled


def _call_bias(job: PassJob) -> torch.Tensor | None:
    """The bias of the whole call; None if it has none."""
    if job.bias is None:
        return None
    shape = job.problem.shape
    return job.bias.of_call(shape.bias_dtype, job.device, shape.batch_shape)


def _call_kernel(
    job: PassJob, group: Group | None, causal: bool, bias: torch.Tensor | None
) -> tuple[torch.Tensor, ...] | None:
    """One kernel call: the results of ``group``, or of the whole call for None.

    Returns:
        None if gradients that may have to be scaled are not finite.
    """
    inputs = _kernel_inputs(job, group)
    call = _call_of(job, group, inputs, causal, bias)
    if job.problem.spec.backward:
        saved = _saved_of(job, inputs)
        gradients = job.problem.kernel.whole_backward(call, saved)
        return usable_gradients(gradients, job.problem, job.device)
    out, lse = job.problem.kernel.whole_forward(call)
    if job.sinks is not None:
        sinks = job.sinks if group is None else job.sinks[group.query_heads]
        join_sinks_(out, lse, sinks)
    return out, lse


def usable_gradients(
    gradients: Three, problem: Problem, device: torch.device
) -> Three | None:
    """Return the gradients of a kernel call; None if they are not finite, and may have
    to be scaled."""
    if not problem.scaled or capturing(device) or all_finite(gradients):
        return gradients
    return None


def _call_of(
    job: PassJob,
    group: Group | None,
    inputs: NamedTensors,
    causal: bool,
    bias: torch.Tensor | None,
) -> Call:
    """The kernel call of ``group``, or of the whole call for None."""
    joins_sinks = job.sinks is not None and not job.problem.spec.backward
    return Call(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        causal,
        job.scale,
        bias,
        # Unrounded where the kernel can, because the sinks come after.
        stored=job.problem.shape.state_dtype
        if joins_sinks
        else job.problem.place.result_dtype,
        dropout=job.dropout if group is None else job.group_dropout(group),
        first_entry=0 if group is None else group.entry_numbers.start,
    )


def _kernel_inputs(job: PassJob, group: Group | None) -> NamedTensors:
    """The inputs by name, (b, heads, n, d), readable; lse is (b, heads, n)."""
    shape = job.problem.shape
    unreadable = job.problem.place.unreadable_inputs
    if group is None and len(shape.batch_shape) == 1 and not unreadable:
        return job.tensors
    inputs: NamedTensors = {}
    for item in job.problem.spec.inputs:
        tensor = job.tensors[item.name]
        if group is not None:
            part = group_part(tensor, group, item.axis)
        else:
            part = flatten_batch(tensor, shape)
        if item.name in unreadable:
            part = as_kernel_readable(part, item.dtype(shape))
        inputs[item.name] = part
    return inputs


def saved_of(
    problem: Problem,
    device: torch.device,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Saved:
    """The tensors of a backward after query, key and value, (b, heads, n, ...), as its
    kernel reads them on ``device``."""
    shape = problem.shape
    lse = lse.to(device)
    if not problem.kernel.accepts_inf_lse:
        # A row without keys has scores -inf and lse -inf. With lse 0 instead, exp(score
        # - lse) is 0, not NaN.
        lse = lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)
    out_dtype = shape.state_dtype if shape.wide_out else shape.dtype
    grad_out = as_kernel_readable(grad_out, shape.dtype)
    out = as_kernel_readable(out, out_dtype)
    return Saved(grad_out, out, lse)


def _saved_of(job: PassJob, inputs: NamedTensors) -> Saved:
    """The tensors of a backward after query, key and value, as its kernel reads
    them."""
    return saved_of(
        job.problem,
        job.device,
        inputs["grad_out"],
        inputs["out"],
        inputs["lse"],
    )


def _compute_scaled(job: PassJob, schedule: Schedule, group: Group) -> None:
    """Compute a head group by the scaled backward, head by head."""
    # Where the forward's state was in host memory, so is its lse.
    lse = job.tensors["lse"].to(job.device)
    job = replace(job, tensors={**job.tensors, "lse": lse})
    task, rectangles = all_rectangles(job.shape, schedule.decomposition)
    job.make_results()
    for number in group.entry_numbers:
        entry = replace(group, entry_numbers=range(number, number + 1))
        for kv_head in range(group.kv_start, group.kv_stop):
            head = replace(entry, kv_start=kv_head, kv_stop=kv_head + 1)
            tensors = job.task_tensors(
                task,
                rectangles,
                head,
                schedule.limits,
            )
            compute_group(job, tensors, head)
