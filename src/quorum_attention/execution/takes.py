"""What running a pass takes, in bytes and in counts, before the planner makes sums of them."""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.execution.pass_spec import PassSpec
from quorum_attention.execution.placement import Placement
from quorum_attention.execution.workload import GroupSize, Workload
from quorum_attention.kernels.delta import carrier_bytes
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.traits import traits_of


@dataclass(frozen=True, slots=True)
class Bytes:
    """Device bytes at most, of every tensor by itself: allocators round each of them.

    Attributes:
        workspace: of kernels, rounded already.
        slots: the arena.
        accumulators: states outside of slots.
        results: what is returned, and copies of what is given.
    """

    workspace: int
    slots: int = 0
    accumulators: tuple[int, ...] = ()
    results: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """What a machine is kept busy with, in counts; seconds are the planner's (planner/cost.py).

    Attributes:
        units: of work that are issued, of all head groups together.
        at_once: a unit is all tasks of a head group.
        uncut: kernel calls are not cut to what a cache takes.
        merges: results of kernel calls are merged, by whoever is called.
        rewritten: bytes of states that are written once more beside that.
        up, down: bytes that are copied to slots, and back.
        resident: from device memory, and to it.
        hidden_by: units that the copies of all but one run beside; 1: none does.
        set_up: units that the host sets up.
        copies: of a unit, that the host issues.
        run_copies: tensors that every run of neighbouring tokens is copied of besides.
        begun: kernel calls' worth of the host's time beside the calls themselves.
        passes: what takes a pass whatever its size is taken so often.
        even: all units are alike.
    """

    units: int
    at_once: bool = False
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


def result_bytes(spec: PassSpec, work: Workload, place: Placement) -> tuple[int, ...]:
    """Of results with a dtype of their own, where the budget counts them."""
    if place.results_given or not place.resident:
        return ()
    size = place.result_dtype.itemsize
    return tuple(s.count(work) * size for s in spec.states if s.over is not None)


def kept_bytes(spec: PassSpec, work: Workload) -> tuple[int, ...]:
    """Of states that are results as they are."""
    size = work.state_dtype.itemsize
    return tuple(state.count(work) * size for state in spec.states if state.over is None)


def state_bytes(
    spec: PassSpec,
    work: Workload,
    group: GroupSize,
    most_rows: int | None = None,
    *,
    kept: bool = False,
) -> tuple[int, ...]:
    """Of a head group's states whose results have a dtype of their own.

    Args:
        most_rows: of each head that have a state; None: all of them.
        kept: of the other states as well.
    """
    size = work.state_dtype.itemsize
    most = work.n_tokens if most_rows is None else most_rows
    return tuple(
        state.count(work, group, min(state.rows(work), most)) * size
        for state in spec.states
        if kept or state.over is not None
    )


def moved_bytes(spec: PassSpec, work: Workload) -> tuple[int, int]:
    """Of all inputs, each once, and of all states."""
    inputs = sum(item.count(work) * item.dtype(work).itemsize for item in spec.inputs)
    states = sum(state.count(work) * work.state_dtype.itemsize for state in spec.states)
    return inputs, states


def bytes_before(
    spec: PassSpec, work: Workload, kernel: InnerKernel, place: Placement
) -> tuple[int, ...]:
    """Of what a backward makes of what it is given before anything else."""
    if not spec.backward:
        return ()
    return place.divided or 0, corrected_bytes(work, kernel) if place.resident else 0


def copied_bytes(
    spec: PassSpec, work: Workload, group: GroupSize, place: Placement
) -> tuple[int, ...]:
    """Of a head group's copies of what no operator takes as it lies."""
    sizes = [item.count(work, group) for item in spec.inputs if item.copied]
    return tuple(size * work.element_bytes for size in sizes[: place.copied])


def corrected_bytes(work: Workload, kernel: InnerKernel) -> int:
    """Of a delta by probabilities, where a backward takes it (kernels/delta.py)."""
    if not traits_of(kernel).plain_softmax:
        return 0
    return carrier_bytes(
        work.dtype,
        work.batch * work.heads,
        work.n_queries,
        work.n_keys,
        work.head_dim + work.value_dim,
    )
