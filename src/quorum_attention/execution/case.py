"""The two passes as data, and one pass of a call without its tensors.

The forward merges the statistics of every row over the tasks (paper, Algorithm 1). The backward
adds up three gradients (paper, Algorithm 2): given the global log-sum-exp, every task computes its
part of the true probabilities, P = exp(s - lse) <= 1 (paper, Equation 9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from quorum_attention.decomposition.pieces import Pieces
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.scaling import scales
from quorum_attention.execution.workload import Axis, GroupSize, Workload
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    Extent,
    Gradients,
    InnerKernel,
    Saved,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.reference import small_bytes
from quorum_attention.kernels.scaling import Scaling

Width = Literal["head_dim", "value_dim", "one"]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A tensor with a row for every query, or for every key.

    Attributes:
        name: of the tensor.
        axis: whether its rows are those of queries or of keys.
        width: the numbers in a row. A tensor of width "one" has no dimension for them.
    """

    name: str
    axis: Axis
    width: Width

    def columns(self, work: Workload) -> int:
        """How many numbers a row has."""
        if self.width == "one":
            return 1
        return work.head_dim if self.width == "head_dim" else work.value_dim

    def rows(self, work: Workload) -> int:
        """How many rows a head has."""
        return work.n_queries if self.axis == "query" else work.n_keys

    def heads(self, work: Workload, kv_heads: int) -> int:
        """How many heads belong to ``kv_heads`` key/value heads."""
        return kv_heads * (work.queries_per_key_head if self.axis == "query" else 1)

    def count(self, work: Workload, group: GroupSize | None = None, rows: int | None = None) -> int:
        """How many numbers ``rows`` rows (default: all) of a group (default: the call) have."""
        size = GroupSize(work.batch, work.kv_heads) if group is None else group
        rows = self.rows(work) if rows is None else rows
        return size.batch * self.heads(work, size.kv_heads) * rows * self.columns(work)

    def shape(self, work: Workload) -> tuple[int, ...]:
        """The shape of the whole tensor: (*batch, heads, rows, width)."""
        found = (*work.batch_shape, self.heads(work, work.kv_heads), self.rows(work))
        return found if self.width == "one" else (*found, self.columns(work))


@dataclass(frozen=True, slots=True)
class InputSpec(RowSpec):
    """A tensor of which every task reads its rows.

    Attributes:
        copied: whether it may have another dtype than the inputs, or strides that operators refuse.
            Routes without slots then copy it, one head group at a time.
        of_state: whether it has the state's dtype, not the inputs'.
        of_scores: whether probabilities are made of it. Rows that fill up a chunk repeat the
            last one; those of other inputs are 0 (execution/trimming.py).
    """

    copied: bool = False
    of_state: bool = False
    of_scores: bool = False

    def dtype(self, work: Workload) -> torch.dtype:
        """Its dtype as kernels get it."""
        return work.state_dtype if self.of_state else work.dtype


@dataclass(frozen=True, slots=True)
class StateSpec(RowSpec):
    """A tensor that accumulates row by row over the tasks, in the state's dtype.

    Attributes:
        fill: the value of a row before any task has added to it.
        over: the input whose rows finished rows may overwrite in a slot, where the result has
            another dtype than the state. None: the state itself is the result.
        words: the result's name in error messages.
    """

    fill: float
    over: str | None
    words: str


@dataclass(frozen=True, slots=True, eq=False)
class PassSpec:
    """One of the two passes, ``FORWARD`` or ``BACKWARD``; compared by identity.

    Attributes:
        name: "forward" or "backward", for people.
        backward: whether it is the backward.
        inputs: the tensors it reads: query, key and value first.
        states: the tensors it accumulates; its results, in this order.
        combined: groups of indices of ``states`` that are combined by one call.
        combine: combines parts with states, in place: ``combine(*states, *parts)``.
        products: matrix products for each pair of tiles.
        divided: the input that a scaled backward divides by powers of two; None: never scaled.
        accumulate: adds a task's part to states (b, h, n, d), or (b, h, n) for width "one".
        of_task: a task's part as ``Kernel.task_forward`` returns it; reads the inputs after the
            first three from its last argument.
        of_call: the results of a whole call as ``Kernel.whole_forward`` returns them; reads the
            same from its last argument, the lse with 0 in place of -inf.
        workspace: most bytes that ``accumulate`` allocates.
    """

    name: str
    backward: bool
    inputs: tuple[InputSpec, ...]
    states: tuple[StateSpec, ...]
    combined: tuple[tuple[int, ...], ...]
    combine: Callable[..., None]
    products: int
    divided: str | None
    accumulate: Callable[[InnerKernel, TaskTensors, Tensors, Sequence[torch.Tensor], Scaling], None]
    of_task: Callable[[InnerKernel, TaskTensors, Tensors], tuple[torch.Tensor, ...]]
    of_call: Callable[[InnerKernel, Call, Tensors], tuple[torch.Tensor, ...]]
    workspace: Callable[[InnerKernel, CallShape, Extent], int]


def spec_of(backward: bool) -> PassSpec:
    """The backward, or the forward."""
    return BACKWARD if backward else FORWARD


def _merge_into(
    kernel: InnerKernel,
    task: TaskTensors,
    given: Tensors,
    states: Sequence[torch.Tensor],
    scaling: Scaling,
) -> None:
    kernel.forward(task, Statistics(*states))


def _add_to(
    kernel: InnerKernel,
    task: TaskTensors,
    given: Tensors,
    states: Sequence[torch.Tensor],
    scaling: Scaling,
) -> None:
    query, key, value = states
    kernel.backward(
        task,
        Gradients(given["grad_out"], given["out"], given["lse"], query, key, value, scaling),
    )


def _saved(given: Tensors) -> Saved:
    return Saved(given["grad_out"], given["out"], given["lse"])


_READ = (
    InputSpec("query", "query", "head_dim", of_scores=True),
    InputSpec("key", "key", "head_dim", of_scores=True),
    InputSpec("value", "key", "value_dim"),
)

FORWARD = PassSpec(
    name="forward",
    backward=False,
    inputs=_READ,
    states=(
        StateSpec("out", "query", "value_dim", 0.0, "query", "the output"),
        StateSpec("lse", "query", "one", float("-inf"), None, "the log-sum-exp"),
    ),
    combined=((0, 1),),
    combine=merge_,
    products=2,
    divided=None,
    accumulate=_merge_into,
    of_task=lambda kernel, task, given: kernel.task_forward(task),
    of_call=lambda kernel, call, given: kernel.whole_forward(call),
    workspace=lambda kernel, call, extent: kernel.forward_workspace_bytes(call, extent),
)

BACKWARD = PassSpec(
    name="backward",
    backward=True,
    inputs=(
        *_READ,
        InputSpec("out", "query", "value_dim", copied=True),
        InputSpec("grad_out", "query", "value_dim", copied=True),
        InputSpec("lse", "query", "one", of_state=True, of_scores=True),
    ),
    states=(
        StateSpec("query", "query", "head_dim", 0.0, "query", "the query's gradient"),
        StateSpec("key", "key", "head_dim", 0.0, "key", "the key's gradient"),
        StateSpec("value", "key", "value_dim", 0.0, "value", "the value's gradient"),
    ),
    combined=((0,), (1,), (2,)),
    combine=add_,
    products=5,
    divided="grad_out",
    accumulate=_add_to,
    of_task=lambda kernel, task, given: kernel.task_backward(task, _saved(given)),
    of_call=lambda kernel, call, given: kernel.whole_backward(call, _saved(given)),
    workspace=lambda kernel, call, extent: kernel.backward_workspace_bytes(call, extent),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placement:
    """What a plan has to know about where a call's tensors are.

    Attributes:
        device_type: of the device that computes. If it is the CPU, the budget counts host memory.
        resident: whether the inputs are on the device that computes.
        results_given: whether the caller passed the results, which the budget then does not count.
        result_dtype: of the output (forward) or of the gradients (backward).
        dense_rows: whether operators can read the inputs without a copy, if they are resident.
        copied: how many of upstream gradient and output operators cannot read (because they are
            expanded or of another dtype). Routes without slots copy them a head group at a time.
        divided: bytes of the divided copy of an upstream gradient that the inputs' dtype cannot
            hold, which is made first (execution/call.py). None: it is not divided.
        lse_here: whether the lse of a backward is on the device that computes; plans assume it.
        lse_given: whether the caller passed the lse of a forward too.
    """

    device_type: str
    resident: bool
    results_given: bool
    result_dtype: torch.dtype
    dense_rows: bool = True
    copied: int = 0
    divided: int | None = None
    lse_here: bool = True
    lse_given: bool = False

    @property
    def in_place(self) -> bool:
        """Whether operators can read the inputs where they are, without a copy."""
        return self.resident and self.dense_rows

    @property
    def is_divided(self) -> bool:
        """Whether the upstream gradient is divided."""
        return self.divided is not None

    @property
    def backend(self) -> Backend:
        """The backend of the device that computes."""
        return BACKENDS[self.device_type]

    def counts(self, home: str) -> bool:
        """Whether the budget counts memory at ``home``, which is "device" or "host"."""
        return home == "device" or not self.backend.own_memory


@dataclass(frozen=True, slots=True)
class Case:
    """One pass of one call, without its tensors.

    Attributes:
        work: the call's sizes.
        kernel: the inner kernel.
        spec: which pass.
        place: where its tensors are.
    """

    work: Workload
    kernel: InnerKernel
    spec: PassSpec
    place: Placement

    @property
    def scaled(self) -> bool:
        """Whether the pass is a scaled backward (execution/scaling.py)."""
        return self.spec.divided is not None and scales(self.kernel, self.work)

    def workspace(self, extent: Extent) -> int:
        """Most bytes that the kernel allocates at one time for work of ``extent``."""
        return self.spec.workspace(self.kernel, self.call_shape, extent)

    @property
    def call_shape(self) -> CallShape:
        """What kernels ask about."""
        return self.work.call_shape(self.place.device_type, self.spec.backward)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Most device bytes, each tensor by itself because allocators round up each of them.

    Attributes:
        workspace: of kernels; rounded up already.
        slots: of the arena.
        accumulators: of each state outside of slots.
        results: of each result, and of each copy of an input.
    """

    workspace: int
    slots: int = 0
    accumulators: tuple[int, ...] = ()
    results: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """The work of a pass in counts; the planner turns it into seconds (planner/price.py).

    Attributes:
        units: units of all head groups.
        at_once: whether a unit is all tasks of a head group, and how their rectangles are laid out.
        uncut: whether kernel calls are larger than a cache holds, because they are not cut.
        merges: whether results of kernel calls are merged.
        rewritten: bytes of states that are written once more, beside merging.
        up, down: bytes copied into slots, and out of them.
        resident: whether these copies stay within device memory.
        hidden_by: of so many units, the copies of all but one overlap with compute; 1: of none.
        set_up: units that the host sets up.
        copies: copies that the host issues for each unit.
        run_copies: copies that the host issues for each run of neighbouring tokens, besides.
        begun: host time beside the kernel calls, in multiples of the time of one call.
        passes: how often the fixed time of a pass is spent.
        even: whether all units take the same time.
        calls: the kernel calls of a head, where they are no tasks': (queries, keys, causal, how
            many) of each size; None: those of the decomposition's tasks.
    """

    units: int
    at_once: Pieces | None = None
    uncut: bool = False
    merges: bool = True
    rewritten: float = 0.0
    up: float = 0.0
    down: float = 0.0
    resident: bool = False
    hidden_by: int = 1
    set_up: int = 0
    copies: int = 0
    run_copies: int = 0
    begun: int = 0
    passes: int = 0
    even: bool = True
    calls: tuple[tuple[int, int, bool, int], ...] | None = None


def result_bytes(case: Case) -> tuple[int, ...]:
    """Bytes of each result that is not a state itself, if the budget counts them."""
    if case.place.results_given or not case.place.resident:
        return ()
    size = case.place.result_dtype.itemsize
    return tuple(s.count(case.work) * size for s in case.spec.states if s.over is not None)


def final_bytes(case: Case) -> tuple[int, ...]:
    """Bytes of each state that is a result itself (the log-sum-exp), if the budget counts them."""
    if case.place.lse_given:
        return ()
    size = case.work.state_dtype.itemsize
    return tuple(s.count(case.work) * size for s in case.spec.states if s.over is None)


def state_bytes(
    case: Case, group: GroupSize, most_rows: int | None = None, *, all_states: bool = False
) -> tuple[int, ...]:
    """Bytes of each state of a head group, without those that are results themselves.

    Args:
        most_rows: most rows of a head that have a state; None: all.
        all_states: include the states that are results themselves.
    """
    work = case.work
    most = work.n_tokens if most_rows is None else most_rows
    return tuple(
        state.count(work, group, min(state.rows(work), most)) * work.state_dtype.itemsize
        for state in case.spec.states
        if all_states or state.over is not None
    )


def in_results(case: Case) -> bool:
    """Whether states over the inputs are the results themselves: results lie where compute is, and
    have the state's dtype."""
    place = case.place
    return not place.backend.own_memory and place.result_dtype == case.work.state_dtype


def moved_bytes(case: Case) -> tuple[int, int]:
    """Bytes of all inputs together, and of all states together."""
    work, spec = case.work, case.spec
    inputs = sum(item.count(work) * item.dtype(work).itemsize for item in spec.inputs)
    return inputs, sum(s.count(work) * work.state_dtype.itemsize for s in spec.states)


def bytes_before(case: Case) -> tuple[int, ...]:
    """Bytes of each tensor that a backward makes before it begins: the divided upstream gradient
    and the corrected output."""
    if not case.spec.backward:
        return ()
    corrected = corrected_bytes(case.work, case.kernel) if case.place.resident else 0
    return case.place.divided or 0, corrected


def copied_bytes(case: Case, group: GroupSize, most_rows: int | None = None) -> tuple[int, ...]:
    """Bytes of a head group's copies of inputs that operators cannot read as they are.

    Args:
        most_rows: most rows of a head that are copied at a time; None: all.
    """
    sizes = [item.count(case.work, group, most_rows) for item in case.spec.inputs if item.copied]
    return tuple(size * case.work.element_bytes for size in sizes[: case.place.copied])


def corrected_bytes(work: Workload, kernel: InnerKernel) -> int:
    """Bytes of the delta that a backward computes from probabilities; 0 if its
    kernel is not plain softmax."""
    # Rows with a sink have weights that do not add up to 1.
    if work.sinks or not kernel.plain_softmax:
        return 0
    extent = Extent(
        work.batch, work.heads, work.kv_heads, work.n_tokens, work.n_queries, work.n_keys
    )
    return small_bytes(work.call_shape("cpu", needs_grad=True), extent)
