"""What a route is asked about: can it run this pass, and what memory and time does that take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.decomposition.pieces import Pieces
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.pass_spec import PassSpec
from quorum_attention.execution.scaling import scales
from quorum_attention.execution.workload import GroupSize, Workload
from quorum_attention.kernels.protocol import CallShape, Extent, InnerKernel
from quorum_attention.kernels.reference import small_bytes


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
            hold, which is made first (execution/job.py). None: it is not divided.
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
class Load:
    """The work of a pass in counts; the planner turns it into seconds (planner/cost.py).

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
