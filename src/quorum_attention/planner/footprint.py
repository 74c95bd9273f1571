"""How many device bytes a schedule takes at most: the same sums the executor allocates by."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from quorum_attention.execution.direct import runs_whole
from quorum_attention.execution.scaling import scales
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.slots import aligned, backward_layout, forward_layout
from quorum_attention.execution.workload import GroupSize, Workload
from quorum_attention.kernels.protocol import InnerKernel

# torch's CUDA caching allocator hands out memory in blocks of at least this size.
_ROUNDING = 512


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a call's tensors live, as far as the budget counts them.

    Attributes:
        device_type: of the computing device. On the CPU, host memory is what the budget counts.
        resident: the inputs are on the computing device.
        results_given: the caller passed preallocated results, which the budget does not count.
        result_dtype: of the output (forward) or of the gradients (backward).
        dense_rows: the inputs' last dimension is contiguous, so a kernel can take them in place.
        copied_bytes: of what the pass must copy first (a gradient or output of another dtype).
    """

    device_type: str
    resident: bool
    results_given: bool
    result_dtype: torch.dtype
    dense_rows: bool = True
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Device bytes by purpose; ``total`` is what is held against the budget."""

    slots: int
    workspace: int
    accumulators: int
    results: int

    @property
    def total(self) -> int:
        """All of it, together with the allocator's rounding."""
        parts = (self.slots, self.workspace, self.accumulators, self.results)
        return sum(parts) + _ROUNDING * sum(part > 0 for part in parts)


def goes_direct(work: Workload, schedule: Schedule, kernel: InnerKernel, place: Placement) -> bool:
    """Whether the kernel runs on the inputs as they lie (see ``execution.forward``)."""
    return place.resident and place.dense_rows and runs_whole(work, schedule, kernel)


def forward_footprint(
    work: Workload, schedule: Schedule, kernel: InnerKernel, place: Placement
) -> Footprint:
    """Device bytes of a forward pass."""
    call = work.call_shape(place.device_type, needs_grad=False)
    direct = goes_direct(work, schedule, kernel, place)
    extent = replace(schedule.extent(work), direct=direct)
    workspace = kernel.forward_workspace_bytes(call, extent)
    rows = work.batch * work.heads * work.n_queries
    out = rows * work.value_dim * place.result_dtype.itemsize
    lse = rows * work.state_dtype.itemsize
    counts_results = place.resident and not place.results_given
    if direct:
        if schedule.group == GroupSize(work.batch, work.kv_heads):
            # The kernel's own output is the result, unless it has to be cast.
            cast = place.result_dtype != work.dtype and counts_results
            return Footprint(0, workspace, 0, out if cast else 0)
        return Footprint(0, workspace, 0, (out if counts_results else 0) + lse)
    if schedule.sweep:
        rows_of_group = _group_rows(work, schedule, "query")
        held = rows_of_group * work.value_dim * work.state_dtype.itemsize + lse
        workspace *= schedule.streams
        return Footprint(0, workspace, held, out if counts_results else 0)
    layout = forward_layout(
        work, schedule.group, schedule.decomposition.max_task_tokens, place.result_dtype
    )
    counts_home = place.device_type == "cpu" or schedule.accumulator == "device"
    home = 0
    if counts_home:
        home += aligned(lse)
        if place.result_dtype != work.state_dtype:
            width = work.value_dim * work.state_dtype.itemsize
            home += _group_rows(work, schedule, "query") * width
    return Footprint(
        schedule.n_cap * layout.slot_bytes,
        schedule.streams * workspace,
        home,
        out if counts_results else 0,
    )


def backward_footprint(
    work: Workload, schedule: Schedule, kernel: InnerKernel, place: Placement
) -> Footprint:
    """Device bytes of a backward pass; output and log-sum-exp are there already."""
    call = work.call_shape(place.device_type, needs_grad=True)
    direct = goes_direct(work, schedule, kernel, place)
    extent = replace(schedule.extent(work), direct=direct)
    workspace = kernel.backward_workspace_bytes(call, extent)
    query_rows = work.batch * work.heads * work.n_queries
    key_rows = work.batch * work.kv_heads * work.n_keys
    elements = query_rows * work.head_dim + key_rows * (work.head_dim + work.value_dim)
    results = elements * place.result_dtype.itemsize
    counted = results if place.resident and not place.results_given else 0
    if direct:
        # The log-sum-exp is copied once, to take -inf out of it.
        lse = 2 * query_rows * work.state_dtype.itemsize + query_rows
        whole = schedule.group == GroupSize(work.batch, work.kv_heads)
        return Footprint(0, workspace, lse, place.copied_bytes + (0 if whole else counted))
    if schedule.sweep:
        query, key = _group_rows(work, schedule, "query"), _group_rows(work, schedule, "key")
        widths = query * work.head_dim + key * (work.head_dim + work.value_dim)
        held = widths * work.state_dtype.itemsize
        if scales(kernel, work):
            held += query * work.value_dim * work.element_bytes + 4 * _ROUNDING
        workspace *= schedule.streams
        return Footprint(0, workspace, held + 3 * _ROUNDING, place.copied_bytes + counted)
    layout = backward_layout(
        work,
        schedule.group,
        schedule.decomposition.max_task_tokens,
        place.result_dtype,
        scaled=scales(kernel, work),
    )
    home = 0
    counts_home = place.device_type == "cpu" or schedule.accumulator == "device"
    if counts_home and place.result_dtype != work.state_dtype:
        size = work.state_dtype.itemsize
        home += _group_rows(work, schedule, "query") * work.head_dim * size
        home += _group_rows(work, schedule, "key") * (work.head_dim + work.value_dim) * size
    slots = schedule.n_cap * layout.slot_bytes
    copied = place.copied_bytes + counted
    return Footprint(slots, schedule.streams * workspace, home, copied)


def _group_rows(work: Workload, schedule: Schedule, axis: str) -> int:
    heads, n = schedule.group.kv_heads, work.n_keys
    if axis == "query":
        heads, n = heads * work.queries_per_key_head, work.n_queries
    return math.prod((schedule.group.batch, heads, n))
