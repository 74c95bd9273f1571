"""How many device bytes a schedule takes at most: the same sums the executor allocates by."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from quorum_attention.execution.device.backend import ROUNDING_BYTES, Backend
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.pass_spec import BACKWARD, FORWARD
from quorum_attention.execution.routes.whole import gives_directly, runs_whole
from quorum_attention.execution.scaling import scales
from quorum_attention.execution.schedule import Home, Schedule
from quorum_attention.execution.slots import aligned, slot_layout
from quorum_attention.execution.workload import GroupSize, Workload
from quorum_attention.kernels.delta import carrier_bytes
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.traits import traits_of


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a call's tensors live, as far as the budget counts them.

    Attributes:
        device_type: of the computing device. On the CPU, host memory is what the budget counts.
        resident: the inputs are on the computing device.
        results_given: the caller passed preallocated results, which the budget does not count.
        result_dtype: of the output (forward) or of the gradients (backward).
        dense_rows: the inputs' last dimension is contiguous, so a kernel can take them in place.
        copied: how many of the upstream gradient and the output operators cannot take as they lie
            (expanded, or of another dtype): without slots they are copied, a head group at a time.
        copied_bytes: of a copy of the upstream gradient made before anything else.
        divided: it is made, because the inputs' dtype cannot hold the gradient as it is.
    """

    device_type: str
    resident: bool
    results_given: bool
    result_dtype: torch.dtype
    dense_rows: bool = True
    copied: int = 0
    copied_bytes: int = 0
    divided: bool = False

    @property
    def backend(self) -> Backend:
        """Of the computing device."""
        return BACKENDS[self.device_type]

    def counts(self, home: Home) -> bool:
        """Whether accumulators there count against the budget."""
        return home == "device" or not self.backend.own_memory


@dataclass(frozen=True, slots=True)
class Footprint:
    """Device bytes by purpose; ``total`` is what is held against the budget.

    ``rounding``: what the allocator may hand out beyond what it is asked for.
    """

    slots: int
    workspace: int
    accumulators: int
    results: int
    rounding: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.slots + self.workspace + self.accumulators + self.results + self.rounding


def _footprint(
    place: Placement,
    *,
    workspace: int,
    slots: int = 0,
    accumulators: tuple[int, ...] = (),
    results: tuple[int, ...] = (),
) -> Footprint:
    """From the bytes of each tensor; a kernel's workspace bound has its own rounding in it."""
    tensors = [size for size in (slots, *accumulators, *results) if size > 0]
    rounding = place.backend.rounding(tensors) + (ROUNDING_BYTES if workspace > 0 else 0)
    return Footprint(slots, workspace, sum(accumulators), sum(results), rounding)


def goes_direct(
    work: Workload, schedule: Schedule, kernel: InnerKernel, place: Placement, *, backward: bool
) -> bool:
    """Whether the kernel runs on the inputs as they lie (routes/whole.py)."""
    able = place.resident and place.dense_rows and runs_whole(work, schedule, kernel)
    if able and backward:
        return gives_directly(kernel, work, place.result_dtype, divided=place.divided)
    return able


def forward_footprint(
    work: Workload, schedule: Schedule, kernel: InnerKernel, place: Placement
) -> Footprint:
    """Device bytes of a forward pass."""
    call = work.call_shape(place.device_type, needs_grad=False)
    direct = goes_direct(work, schedule, kernel, place, backward=False)
    extent = replace(schedule.extent(work), direct=direct or schedule.one_by_one)
    workspace = kernel.forward_workspace_bytes(call, extent)
    rows = work.batch * work.heads * work.n_queries
    out = rows * work.value_dim * place.result_dtype.itemsize
    lse = rows * work.state_dtype.itemsize
    counts_results = place.resident and not place.results_given
    results = (out,) if counts_results else ()
    if direct:
        if schedule.group == GroupSize(work.batch, work.kv_heads):
            # The kernel's own output is the result, unless it has to be cast.
            cast = place.result_dtype != work.dtype
            return _footprint(place, workspace=workspace, results=results if cast else ())
        return _footprint(place, workspace=workspace, results=(*results, lse))
    if schedule.sweep:
        rows_of_group = _group_rows(work, schedule, "query")
        state = rows_of_group * work.value_dim * work.state_dtype.itemsize
        accumulators: tuple[int, ...] = (state, lse)
        if schedule.one_by_one:
            # The state of shared rows, with an lse of its own.
            accumulators = (state, rows_of_group * work.state_dtype.itemsize, lse)
        return _footprint(
            place,
            workspace=schedule.streams * workspace,
            accumulators=accumulators,
            results=results,
        )
    layout = slot_layout(
        FORWARD, work, schedule.group, schedule.task_rows(work), place.result_dtype
    )
    home: tuple[int, ...] = ()
    if place.counts(schedule.accumulator):
        home = (aligned(lse),)
        if place.result_dtype != work.state_dtype:
            width = work.value_dim * work.state_dtype.itemsize
            home += (_group_rows(work, schedule, "query") * width,)
    return _footprint(
        place,
        slots=schedule.n_cap * layout.slot_bytes,
        workspace=schedule.streams * workspace,
        accumulators=home,
        results=results,
    )


def backward_footprint(
    work: Workload, schedule: Schedule, kernel: InnerKernel, place: Placement
) -> Footprint:
    """Device bytes of a backward pass; output and log-sum-exp are there already."""
    call = work.call_shape(place.device_type, needs_grad=True)
    direct = goes_direct(work, schedule, kernel, place, backward=True)
    extent = replace(schedule.extent(work), direct=direct or schedule.one_by_one)
    workspace = kernel.backward_workspace_bytes(call, extent)
    query_rows = work.batch * work.heads * work.n_queries
    key_rows = work.batch * work.kv_heads * work.n_keys
    widths = (query_rows * work.head_dim, key_rows * work.head_dim, key_rows * work.value_dim)
    results: tuple[int, ...] = ()
    if place.resident and not place.results_given:
        results = tuple(width * place.result_dtype.itemsize for width in widths)
    rows_of_group = schedule.group.batch * schedule.group.kv_heads * work.queries_per_key_head
    rows_of_group *= work.n_queries
    copied = (rows_of_group * work.value_dim * work.element_bytes,) * place.copied
    corrected = corrected_bytes(work, kernel) if place.resident else 0
    before = (place.copied_bytes, corrected)
    if direct:
        # The log-sum-exp is copied once, to take -inf out of it.
        lse = query_rows * work.state_dtype.itemsize
        repeated: tuple[int, ...] = ()
        if scales(kernel, work):
            # One head at a time where an operator's gradients are not finite.
            one = replace(schedule, group=GroupSize(1, 1))
            repeated = _scaled_state(work, one)
            workspace = max(workspace, kernel.backward_workspace_bytes(call, one.extent(work)))
        whole = schedule.group == GroupSize(work.batch, work.kv_heads)
        return _footprint(
            place,
            workspace=workspace,
            accumulators=(lse, lse, query_rows, *repeated),
            results=(*before, *copied, *(() if whole and not repeated else results)),
        )
    state = _gradient_state(work, schedule)
    if schedule.sweep:
        if scales(kernel, work):
            state = _scaled_state(work, schedule)
        return _footprint(
            place,
            workspace=schedule.streams * workspace,
            accumulators=state,
            results=(*before, *copied, *results),
        )
    layout = slot_layout(
        BACKWARD,
        work,
        schedule.group,
        schedule.task_rows(work),
        place.result_dtype,
        scaled=scales(kernel, work),
    )
    home = (
        state
        if place.counts(schedule.accumulator) and place.result_dtype != work.state_dtype
        else ()
    )
    return _footprint(
        place,
        slots=schedule.n_cap * layout.slot_bytes,
        workspace=schedule.streams * workspace,
        accumulators=home,
        results=(*before, *results),
    )


def corrected_bytes(work: Workload, kernel: InnerKernel) -> int:
    """Bytes of a delta by probabilities, where a backward takes it (kernels/delta.py)."""
    if not traits_of(kernel).plain_softmax:
        return 0
    return carrier_bytes(
        work.dtype,
        work.batch * work.heads,
        work.n_queries,
        work.n_keys,
        work.head_dim + work.value_dim,
    )


def _gradient_state(work: Workload, schedule: Schedule) -> tuple[int, ...]:
    """Of a head group's three gradients."""
    query, key = _group_rows(work, schedule, "query"), _group_rows(work, schedule, "key")
    widths = (query * work.head_dim, key * work.head_dim, key * work.value_dim)
    return tuple(width * work.state_dtype.itemsize for width in widths)


def _scaled_state(work: Workload, schedule: Schedule) -> tuple[int, ...]:
    """The same where the backward is scaled: a copy of ``grad_out``, and numbers for each head."""
    copy = _group_rows(work, schedule, "query") * work.value_dim * work.element_bytes
    return (*_gradient_state(work, schedule), copy, *(ROUNDING_BYTES,) * 4)


def _group_rows(work: Workload, schedule: Schedule, axis: str) -> int:
    heads, n = schedule.group.kv_heads, work.n_keys
    if axis == "query":
        heads, n = heads * work.queries_per_key_head, work.n_queries
    if schedule.one_by_one and schedule.trimmed is not None:
        # Rows of one task alone are written where they belong.
        n = min(n, schedule.trimmed.shared)
    return math.prod((schedule.group.batch, heads, n))
