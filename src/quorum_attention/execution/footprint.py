"""Bytes of a pass: what its tensors take on the device that computes, and what is
copied."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quorum_attention.execution.device.backend import ROUNDING_BYTES
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.head_groups import Axis, GroupSize
from quorum_attention.execution.problem import Problem
from quorum_attention.units import format_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Most device bytes of a pass by purpose; ``total`` is what is held against the
    budget.

    What a backward reads of its forward is not counted: it is allocated when the pass
    begins.

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
        """Bytes that the allocator may hand out beyond what it is asked for."""
        all_sizes = [self.slots, *self.accumulators, *self.results]
        sizes = [size for size in all_sizes if size > 0]
        backend = BACKENDS[self.device_type]
        rounding = backend.rounding(sizes)
        if self.workspace > 0:
            # A workspace has one fixed rounding: the kernel's bound includes the rest.
            rounding += ROUNDING_BYTES
        return rounding

    @property
    def total(self) -> int:
        """All of it."""
        return sum(
            (
                self.slots,
                self.workspace,
                *self.accumulators,
                *self.results,
                self.rounding,
            )
        )

    @property
    def words(self) -> str:
        """Its parts, without those that are 0."""
        parts = {
            "slots": self.slots,
            "kernel workspace": self.workspace,
            "accumulators": sum(self.accumulators),
            "results": sum(self.results),
        }
        return ", ".join(
            f"{name} {format_bytes(n_bytes)}"
            for name, n_bytes in parts.items()
            if n_bytes
        )


def result_bytes(problem: Problem) -> tuple[int, ...]:
    """Bytes of each result that is not a state itself, if the budget counts them."""
    if problem.place.results_given or not problem.place.resident:
        return ()
    return _state_sizes(problem, problem.place.result_dtype, are_results=False)


def final_bytes(problem: Problem) -> tuple[int, ...]:
    """Bytes of each state that is a result itself (the log-sum-exp), if the budget
    counts them."""
    if problem.place.lse_given:
        return ()
    return _state_sizes(problem, problem.shape.state_dtype, are_results=True)


def state_bytes(problem: Problem, group: GroupSize) -> tuple[int, ...]:
    """Bytes of each state of a head group, without those that are results
    themselves."""
    dtype = problem.shape.state_dtype
    return _state_sizes(problem, dtype, are_results=False, group=group)


def _state_sizes(
    problem: Problem,
    dtype: torch.dtype,
    *,
    are_results: bool,
    group: GroupSize | None = None,
) -> tuple[int, ...]:
    """Bytes in ``dtype`` of each state of a head group (None: of the call) that is a
    result itself, or is none."""
    return tuple(
        state.count(problem.shape, group) * dtype.itemsize
        for state in problem.spec.states
        if (state.over is None) == are_results
    )


def home_bytes(problem: Problem, group: GroupSize, home: str) -> tuple[int, ...]:
    """Bytes of the states that wait at ``home``, "device" or "host", if the budget
    counts them."""
    if home == "host" and problem.backend.own_memory:
        return ()
    if problem.place.result_dtype == problem.shape.state_dtype:
        return final_bytes(problem)
    return final_bytes(problem) + state_bytes(problem, group)


def accumulates_in_results(problem: Problem) -> bool:
    """Whether states over the inputs are the results themselves: results lie where
    compute is, and have the state's dtype."""
    if problem.backend.own_memory:
        return False
    return problem.place.result_dtype == problem.shape.state_dtype


def moved_bytes(problem: Problem, axis: Axis | None = None) -> tuple[int, int]:
    """Bytes of all inputs together, and of all states together; of one side, or (None)
    of both."""
    shape = problem.shape
    input_bytes = 0
    for item in problem.spec.inputs:
        if axis in (None, item.axis):
            input_bytes += item.n_bytes(shape)
    state_bytes = 0
    for state in problem.spec.states:
        if axis in (None, state.axis):
            state_bytes += state.count(shape) * shape.state_dtype.itemsize
    return input_bytes, state_bytes


def copied_bytes(
    problem: Problem, group: GroupSize, most_rows: int | None = None
) -> tuple[int, ...]:
    """Bytes of a head group's copies of inputs that operators cannot read as they are.

    Args:
        most_rows: most rows of a head that are copied at a time; None: all.
    """
    shape = problem.shape
    place = problem.place
    may_be_unreadable = [item for item in problem.spec.inputs if item.may_be_unreadable]
    copied = may_be_unreadable[: place.n_unreadable]
    copied += [
        item for item in problem.spec.inputs if item.name in place.unreadable_inputs
    ]
    return tuple(
        item.count(shape, group, most_rows) * item.dtype(shape).itemsize
        for item in copied
    )
