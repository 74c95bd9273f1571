"""What running a pass takes, in bytes and in counts, before the planner makes sums of them."""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.execution.case import Case
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


def result_bytes(case: Case) -> tuple[int, ...]:
    """Of results with a dtype of their own, where the budget counts them."""
    if case.place.results_given or not case.place.resident:
        return ()
    size = case.place.result_dtype.itemsize
    return tuple(s.count(case.work) * size for s in case.spec.states if s.over is not None)


def kept_bytes(case: Case) -> tuple[int, ...]:
    """Of states that are results as they are."""
    size = case.work.state_dtype.itemsize
    return tuple(s.count(case.work) * size for s in case.spec.states if s.over is None)


def state_bytes(
    case: Case, group: GroupSize, most_rows: int | None = None, *, kept: bool = False
) -> tuple[int, ...]:
    """Of a head group's states whose results have a dtype of their own.

    Args:
        most_rows: of each head that have a state; None: all of them.
        kept: of the other states as well.
    """
    work = case.work
    most = work.n_tokens if most_rows is None else most_rows
    return tuple(
        state.count(work, group, min(state.rows(work), most)) * work.state_dtype.itemsize
        for state in case.spec.states
        if kept or state.over is not None
    )


def moved_bytes(case: Case) -> tuple[int, int]:
    """Of all inputs, each once, and of all states."""
    work, spec = case.work, case.spec
    inputs = sum(item.count(work) * item.dtype(work).itemsize for item in spec.inputs)
    return inputs, sum(s.count(work) * work.state_dtype.itemsize for s in spec.states)


def bytes_before(case: Case) -> tuple[int, ...]:
    """Of what a backward makes of what it is given before anything else."""
    if not case.spec.backward:
        return ()
    corrected = corrected_bytes(case.work, case.kernel) if case.place.resident else 0
    return case.place.divided or 0, corrected


def copied_bytes(case: Case, group: GroupSize) -> tuple[int, ...]:
    """Of a head group's copies of what no operator takes as it lies."""
    sizes = [item.count(case.work, group) for item in case.spec.inputs if item.copied]
    return tuple(size * case.work.element_bytes for size in sizes[: case.place.copied])


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
