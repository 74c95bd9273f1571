"""A call without its tensors: its head groups, and its two passes as data.

The forward merges the statistics of every row over the tasks (paper, Algorithm 1). The backward
adds up three gradients (paper, Algorithm 2): given the global log-sum-exp, every task computes its
part of the true probabilities, P = exp(s - lse) <= 1 (paper, Equation 9).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from quorum_attention.argument_checks import shown
from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition import Pairs
from quorum_attention.decomposition.layouts import Pieces
from quorum_attention.decomposition.rectangles import Batch
from quorum_attention.execution.device.backend import ROUNDING_BYTES, Backend
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.kernels.protocol import (
    DTYPES,
    CallShape,
    Extent,
    Gradients,
    InnerKernel,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.units import format_bytes

DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


def check_dtype(dtype: Any, name: str) -> None:
    """Raise TypeError if ``dtype`` is none of ``DTYPES``."""
    if dtype not in DTYPES:
        raise TypeError(f"{name} must be one of {DTYPE_NAMES}, got {shown(dtype)}")


@dataclass(frozen=True, slots=True)
class GroupSize:
    """The size of a head group.

    Heads never meet, so cutting between them costs nothing. A group is either some key/value heads
    of one batch entry (``batch`` is 1), or several whole batch entries.
    """

    batch: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Group:
    """One head group: a run of batch entries, and a range of key/value heads.

    Attributes:
        entry_numbers: of its batch entries, all batch dimensions as one.
        batch_shape: the batch dimensions of the call.
        kv_start, kv_stop: its key/value heads.
        queries_per_key_head: query heads that share one of them.
    """

    entry_numbers: range
    batch_shape: tuple[int, ...]
    kv_start: int
    kv_stop: int
    queries_per_key_head: int

    @property
    def first_entry(self) -> tuple[int, ...]:
        """The index of the first batch entry, one number for each batch dimension."""
        return self.index_of(self.entry_numbers.start)

    @property
    def entries(self) -> list[tuple[int, ...]]:
        """The indices of all its batch entries."""
        return [self.index_of(number) for number in self.entry_numbers]

    def index_of(self, number: int) -> tuple[int, ...]:
        """The index of a batch entry, one number for each batch dimension."""
        index = list[int]()
        for size in reversed(self.batch_shape):
            number, place = divmod(number, size)
            index.append(place)
        return tuple(reversed(index))

    @property
    def query_heads(self) -> slice:
        """The query heads that go with the key/value heads."""
        g = self.queries_per_key_head
        return slice(self.kv_start * g, self.kv_stop * g)

    @property
    def key_heads(self) -> slice:
        """The key/value heads."""
        return slice(self.kv_start, self.kv_stop)


def group_sizes(shape: CallShape) -> list[GroupSize]:
    """Group sizes to choose from, largest first: batch entries are halved, then heads."""
    if shape.batch == 0 or shape.kv_heads == 0:
        return []
    sizes = []
    entries = shape.batch
    while entries > 1:
        sizes.append(GroupSize(entries, shape.kv_heads))
        entries = ceil_div(entries, 2)
    heads = shape.kv_heads
    while heads > 1:
        sizes.append(GroupSize(1, heads))
        heads = ceil_div(heads, 2)
    sizes.append(GroupSize(1, 1))
    return sizes


def groups(shape: CallShape, size: GroupSize) -> Iterator[Group]:
    """The head groups of a call, none larger than ``size``, in order."""
    shared = shape.queries_per_key_head
    for first in range(0, shape.batch, size.batch):
        numbers = range(first, min(first + size.batch, shape.batch))
        for head in range(0, shape.kv_heads, size.kv_heads):
            last = min(head + size.kv_heads, shape.kv_heads)
            yield Group(numbers, shape.batch_shape, head, last, shared)


def count_groups(shape: CallShape, size: GroupSize) -> int:
    """How many groups ``groups`` yields."""
    return ceil_div(shape.batch, size.batch) * ceil_div(shape.kv_heads, size.kv_heads)


Axis = Literal["query", "key"]


def group_part(tensor: torch.Tensor, group: Group, axis: Axis) -> torch.Tensor:
    """A head group's part of (*batch, heads, ...), as a view (entries, heads, ...). Its entries
    follow each other in the last batch dimension."""
    heads = group.query_heads if axis == "query" else group.key_heads
    first, n_entries = group.first_entry, len(group.entry_numbers)
    if not first:
        return tensor[heads].unsqueeze(0)
    outer = tensor[first[:-1]] if len(first) > 1 else tensor
    return outer[first[-1] : first[-1] + n_entries, heads]


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

    def columns(self, shape: CallShape) -> int:
        """How many numbers a row has."""
        if self.width == "one":
            return 1
        return shape.head_dim if self.width == "head_dim" else shape.value_dim

    def rows(self, shape: CallShape) -> int:
        """How many rows a head has."""
        return shape.n_queries if self.axis == "query" else shape.n_keys

    def heads(self, shape: CallShape, kv_heads: int) -> int:
        """How many heads belong to ``kv_heads`` key/value heads."""
        return kv_heads * (shape.queries_per_key_head if self.axis == "query" else 1)

    def count(
        self, shape: CallShape, group: GroupSize | None = None, rows: int | None = None
    ) -> int:
        """How many numbers ``rows`` rows (default: all) of a group (default: the call) have."""
        size = GroupSize(shape.batch, shape.kv_heads) if group is None else group
        rows = self.rows(shape) if rows is None else rows
        return size.batch * self.heads(shape, size.kv_heads) * rows * self.columns(shape)

    def shape(self, shape: CallShape) -> tuple[int, ...]:
        """The shape of the whole tensor: (*batch, heads, rows, width)."""
        found = (*shape.batch_shape, self.heads(shape, shape.kv_heads), self.rows(shape))
        return found if self.width == "one" else (*found, self.columns(shape))


@dataclass(frozen=True, slots=True)
class InputSpec(RowSpec):
    """A tensor of which every task reads its rows.

    Attributes:
        may_be_unreadable: whether it may have another dtype than the inputs, or strides that
            operators refuse. Routes without slots then copy it, one head group at a time.
        of_state: whether it has the state's dtype, not the inputs'.
    """

    may_be_unreadable: bool = False
    of_state: bool = False

    def dtype(self, shape: CallShape) -> torch.dtype:
        """Its dtype as kernels get it."""
        return shape.state_dtype if self.of_state else shape.dtype


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
        combined: calls by which the parts of a rectangle are combined with the states.
        products: matrix products for each pair of tiles.
        rescaled_input: the input that a scaled backward divides by powers of two; None: the pass is
            never scaled.
    """

    name: str
    backward: bool
    inputs: tuple[InputSpec, ...]
    states: tuple[StateSpec, ...]
    combined: int
    products: int
    rescaled_input: str | None

    def accumulate(
        self,
        kernel: InnerKernel,
        task: TaskTensors,
        given: Tensors,
        states: Sequence[torch.Tensor],
        scaling: Scaling,
    ) -> None:
        """Add a task's part to states (b, h, n, d), or (b, h, n) for width "one".

        Args:
            given: the inputs after the first three, by name.
        """
        if self.backward:
            query, key, value = states
            saved = given["grad_out"], given["out"], given["lse"]
            kernel.backward(task, Gradients(*saved, query, key, value, scaling))
        else:
            kernel.forward(task, Statistics(*states))


def spec_of(backward: bool) -> PassSpec:
    """The backward, or the forward."""
    return BACKWARD if backward else FORWARD


_READ = (
    InputSpec("query", "query", "head_dim"),
    InputSpec("key", "key", "head_dim"),
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
    combined=1,
    products=2,
    rescaled_input=None,
)

BACKWARD = PassSpec(
    name="backward",
    backward=True,
    inputs=(
        *_READ,
        InputSpec("out", "query", "value_dim", may_be_unreadable=True),
        InputSpec("grad_out", "query", "value_dim", may_be_unreadable=True),
        InputSpec("lse", "query", "one", of_state=True),
    ),
    states=(
        StateSpec("query", "query", "head_dim", 0.0, "query", "the query's gradient"),
        StateSpec("key", "key", "head_dim", 0.0, "key", "the key's gradient"),
        StateSpec("value", "key", "value_dim", 0.0, "value", "the value's gradient"),
    ),
    combined=3,
    products=5,
    rescaled_input="grad_out",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placement:
    """What a plan has to know about where a call's tensors are.

    Attributes:
        resident: whether the inputs are on the device that computes.
        results_given: whether the caller passed the results, which the budget then does not count.
        result_dtype: of the output (forward) or of the gradients (backward).
        inputs_readable: whether operators can read resident inputs without a copy.
        n_unreadable: how many of upstream gradient and output operators cannot read (because they
            are expanded or of another dtype). Routes without slots copy them group by group.
        rescaled_grad_bytes: bytes of the divided copy of an upstream gradient that the input dtype
            cannot hold, which is made first (execution/call.py). None: it is not divided.
        same_dtype: whether upstream gradient and output have the inputs' dtype.
        lse_here: whether the lse of a backward is on the device that computes; plans assume it.
        lse_given: whether the caller passed the lse of a forward too.
        flattenable: whether all inputs of the pass have views (b, heads, n, d), with one batch
            dimension.
    """

    resident: bool
    results_given: bool
    result_dtype: torch.dtype
    inputs_readable: bool = True
    n_unreadable: int = 0
    rescaled_grad_bytes: int | None = None
    same_dtype: bool = True
    lse_here: bool = True
    lse_given: bool = False
    flattenable: bool = True

    @property
    def in_place(self) -> bool:
        """Whether operators can read the inputs where they are, without a copy."""
        return self.resident and self.inputs_readable


@dataclass(frozen=True, slots=True)
class Problem:
    """One pass of one call, without its tensors.

    Attributes:
        shape: the call's sizes.
        kernel: the inner kernel.
        spec: which pass.
        place: where its tensors are.
    """

    shape: CallShape
    kernel: InnerKernel
    spec: PassSpec
    place: Placement

    @property
    def backend(self) -> Backend:
        """The backend of the device that computes. If it is the CPU's, the budget counts host
        memory."""
        return BACKENDS[self.shape.device_type]

    @property
    def without_kernel(self) -> tuple[CallShape, PassSpec, Placement]:
        """All but the kernel, which caches must not hold."""
        return self.shape, self.spec, self.place

    @property
    def pairs(self) -> Pairs:
        """The pairs that the call keeps, by its lengths and the kernel's own mask."""
        return self.kernel.kept_pairs(*self.shape.lengths)

    @property
    def scaled(self) -> bool:
        """Whether the pass is a scaled backward (execution/scaling.py)."""
        return self.spec.rescaled_input is not None and scales(self.kernel, self.shape)

    def workspace(self, extent: Extent) -> int:
        """Most bytes that the kernel allocates at one time for work of ``extent``."""
        if self.spec.backward:
            return self.kernel.backward_workspace_bytes(self.call_shape, extent)
        return self.kernel.forward_workspace_bytes(self.call_shape, extent)

    @property
    def call_shape(self) -> CallShape:
        """What kernels are asked about."""
        return replace(self.shape, needs_grad=self.spec.backward)


def scales(kernel: InnerKernel, shape: CallShape) -> bool:
    """Whether a backward by ``kernel`` is scaled; some kernels gain nothing, or cannot undo it."""
    # Kernels that have dropout compute it in fp32, or scale by themselves.
    return shape.dtype in kernel.scaled_backward and not shape.dropout


@dataclass(frozen=True, slots=True)
class Footprint:
    """Most device bytes of a pass by purpose; ``total`` is what is held against the budget.

    What a backward reads of its forward is not counted: it is allocated when the pass begins.

    Attributes:
        device_type: of the device that computes.
        workspace: of kernels.
        slots: of the arena.
        accumulators: of each state outside of slots.
        results: of each result, and of each copy of an input.
    """

    device_type: str = field(repr=False)
    workspace: int
    slots: int = 0
    accumulators: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    @property
    def rounding(self) -> int:
        """What the allocator may hand out beyond what it is asked for, for each tensor."""
        tensors = [size for size in (self.slots, *self.accumulators, *self.results) if size > 0]
        # A workspace is counted with one fixed rounding: the kernel's bound includes the rest.
        return ROUNDING_BYTES * (self.workspace > 0) + BACKENDS[self.device_type].rounding(tensors)

    @property
    def total(self) -> int:
        """All of it."""
        tensors = sum(self.accumulators) + sum(self.results)
        return self.slots + self.workspace + tensors + self.rounding

    @property
    def words(self) -> str:
        """Its parts, without those that are 0."""
        parts = {
            "slots": self.slots,
            "kernel workspace": self.workspace,
            "accumulators": sum(self.accumulators),
            "results": sum(self.results),
        }
        return ", ".join(f"{name} {format_bytes(n)}" for name, n in parts.items() if n)


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """The work of a pass in counts; the planner turns it into seconds (planner/price.py).

    Attributes:
        units: units of all head groups.
        pieces: how the rectangles of a unit are laid out, if a unit is all tasks of a head group;
            None: a unit is one task.
        uncut: whether kernel calls are larger than a cache holds, because they are not cut.
        merges: whether results of kernel calls are merged.
        up, down: bytes copied into slots, and out of them.
        resident: whether these copies stay within device memory.
        overlapping_units: copies overlap with compute in all but one of this many units; 1 means no
            overlap.
        in_slots: whether units go through slots, which the host sets up.
        run_copies: copies that the host issues for each run of neighbouring tokens of a unit.
        uniform_units: whether all units take the same time.
        calls: the kernel calls of a head, where they are no tasks', and how many of each size there
            are; None: those of the decomposition's tasks.
    """

    units: int
    pieces: Pieces | None = None
    uncut: bool = False
    merges: bool = True
    up: float = 0.0
    down: float = 0.0
    resident: bool = False
    overlapping_units: int = 1
    in_slots: bool = False
    run_copies: int = 0
    uniform_units: bool = True
    calls: tuple[tuple[Batch, int], ...] | None = None


def result_bytes(problem: Problem) -> tuple[int, ...]:
    """Bytes of each result that is not a state itself, if the budget counts them."""
    if problem.place.results_given or not problem.place.resident:
        return ()
    size = problem.place.result_dtype.itemsize
    return tuple(s.count(problem.shape) * size for s in problem.spec.states if s.over is not None)


def final_bytes(problem: Problem) -> tuple[int, ...]:
    """Bytes of each state that is a result itself (the log-sum-exp), if the budget counts them."""
    if problem.place.lse_given:
        return ()
    size = problem.shape.state_dtype.itemsize
    return tuple(s.count(problem.shape) * size for s in problem.spec.states if s.over is None)


def state_bytes(problem: Problem, group: GroupSize) -> tuple[int, ...]:
    """Bytes of each state of a head group, without those that are results themselves."""
    shape = problem.shape
    return tuple(
        state.count(shape, group) * shape.state_dtype.itemsize
        for state in problem.spec.states
        if state.over is not None
    )


def home_bytes(problem: Problem, group: GroupSize, home: str) -> tuple[int, ...]:
    """Bytes of the states that wait at ``home``, "device" or "host", if the budget counts them."""
    if home == "host" and problem.backend.own_memory:
        return ()
    own = problem.place.result_dtype == problem.shape.state_dtype
    return final_bytes(problem) + (() if own else state_bytes(problem, group))


def in_results(problem: Problem) -> bool:
    """Whether states over the inputs are the results themselves: results lie where compute is, and
    have the state's dtype."""
    place = problem.place
    return not problem.backend.own_memory and place.result_dtype == problem.shape.state_dtype


def moved_bytes(problem: Problem, axis: Axis | None = None) -> tuple[int, int]:
    """Bytes of all inputs together, and of all states together; of one side, or (None) of both."""
    shape, spec = problem.shape, problem.spec
    inputs = (
        i.count(shape) * i.dtype(shape).itemsize for i in spec.inputs if axis in (None, i.axis)
    )
    states = sum(s.count(shape) for s in spec.states if axis in (None, s.axis))
    return sum(inputs), states * shape.state_dtype.itemsize


def copied_bytes(
    problem: Problem, group: GroupSize, most_rows: int | None = None
) -> tuple[int, ...]:
    """Bytes of a head group's copies of inputs that operators cannot read as they are.

    Args:
        most_rows: most rows of a head that are copied at a time; None: all.
    """
    sizes = [
        item.count(problem.shape, group, most_rows)
        for item in problem.spec.inputs
        if item.may_be_unreadable
    ]
    return tuple(
        size * problem.shape.dtype.itemsize for size in sizes[: problem.place.n_unreadable]
    )
