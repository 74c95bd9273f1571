"""Decides how a pass of a call runs: its kernel, and its plan if it needs one.

A short pass is run without a plan, which would take longer than the pass. If it runs
out of memory, it is planned after all (``with_plan``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.problem import Placement, Problem
from quorum_attention.execution.routes.streaming import Streaming
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.select import (
    rivals,
    select_kernel,
    unrounded_kernel,
    why_not,
)
from quorum_attention.planner import policy
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.planner.constraints import PlanConstraints
from quorum_attention.planner.kernel_choice import choose_plan
from quorum_attention.planner.options import PlannerOptions
from quorum_attention.planner.plan import Plan
from quorum_attention.planner.price import forward_flops
from quorum_attention.planner.search import refit, short_call
from quorum_attention.units import format_bytes, format_least

_Planned = TypeVar("_Planned")


@dataclass(frozen=True, slots=True)
class Decision:
    """The way a pass is run.

    Attributes:
        problem: the pass, with the kernel that computes it.
        options: what its caller asked for.
        asked_shape: what kernels were asked about, to be chosen.
        any_kernel: whether another kernel may be chosen instead.
        plan: None runs the pass as one kernel call on the inputs as they lie, without a
            report.
    """

    problem: Problem
    options: PlannerOptions
    asked_shape: CallShape
    any_kernel: bool
    plan: Plan | None = None


def decide(
    shape: CallShape,
    place: Placement,
    options: PlannerOptions,
    result_dtype: torch.dtype,
    *,
    backward: bool = False,
    needs_grad: bool = False,
) -> Decision:
    """Decide how to run a pass.

    Args:
        result_dtype: dtype of the output, as the forward returns it. It goes into the
            choice of the kernel in both passes, so that they take the same one.
        needs_grad: whether a backward follows this forward.

    Raises:
        BudgetError: nothing fits; names the smallest budget that would do.
        NotImplementedError: no kernel, or not the one asked for, can run the call.
    """
    device = options.device
    flops = forward_flops(shape)
    asked_shape = replace(shape, needs_grad=needs_grad or backward)
    if backward:
        # A kernel that reads a wide output may itself round outputs.
        asked_shape = replace(asked_shape, wide_out=False)
    # A plan asks for its own kernel.
    kernel_option = unrounded_kernel(
        options.kernel,
        asked_shape,
        device,
        result_dtype,
        backward=backward,
        flops=flops,
    )
    kernel = select_kernel(
        kernel_option, asked_shape, device, flops=flops, backward=backward
    )
    if backward:
        is_wider = result_dtype.itemsize > shape.dtype.itemsize
        kernel = (kernel.as_unrounded() if is_wider else None) or kernel
        shape = replace(shape, wide_out=is_wider and kernel.reads_wide_out)
    problem = Problem(shape, kernel, spec_of(backward), place)
    decision = Decision(problem, options, asked_shape, kernel_option == "auto")
    if _may_go_without_plan(options, place) and is_small(problem, device):
        return decision
    return with_plan(decision)


def with_plan(decision: Decision) -> Decision:
    """Return the same pass with a plan: it is not small, or has run out of memory.

    Raises:
        BudgetError: nothing fits what the reserves leave of the budget.
    """
    try:
        return _planned(decision)
    except BudgetError as error:
        raise decision.options.of_whole_budget(error) from None


def _planned(decision: Decision) -> Decision:
    """Return the same pass with a plan that fits what the reserves leave of the
    budget."""
    options = decision.options
    device = options.device
    # Plans assume that the log-sum-exp is where the device computes; where it is not, a
    # route that reads it in place is left (execution/run_pass.py).
    place = replace(decision.problem.place, lse_here=True)
    problem = replace(decision.problem, place=place)
    hardware = hardware_of(device, problem.shape.dtype, problem.shape.head_dim)
    if options.plan is not None and options.plan.backward == problem.spec.backward:
        plan = refit(options.plan, problem, hardware)
        plan = replace(plan, budget_bytes=options.plan.budget_bytes)
        _check_budget(plan, options.available_bytes)
        return replace(decision, plan=plan)
    asked_shape = decision.asked_shape
    other_kernels: Iterable[InnerKernel] = ()
    if decision.any_kernel:
        other_kernels = rivals(problem.kernel, asked_shape, device)
    kernel, plan = choose_plan(
        problem,
        _constraints(options),
        other_kernels,
        hardware,
        kernel_works=lambda kernel: why_not(kernel, asked_shape, device) is None,
    )
    plan = replace(plan, budget_bytes=options.available_bytes)
    return replace(
        decision, problem=replace(decision.problem, kernel=kernel), plan=plan
    )


def both_passes(plan_pass: Callable[[bool], _Planned]) -> tuple[_Planned, _Planned]:
    """Return what ``plan_pass`` returns for the forward and for the backward, within
    one budget.

    Args:
        plan_pass: is given whether the pass is the backward.

    Raises:
        BudgetError: one of them does not fit; names the pass that needs more, and a
            budget that does for both.
    """
    planned: list[_Planned] = []
    refused: list[tuple[int, str]] = []
    for backward, name in ((False, "forward"), (True, "backward")):
        try:
            planned.append(plan_pass(backward))
        except BudgetError as error:
            refused.append((error.smallest_bytes or 0, f"{name} pass: {error}"))
    if refused:
        smallest_bytes, words = max(refused)
        raise BudgetError(words, smallest_bytes=smallest_bytes or None)
    return planned[0], planned[1]


def _may_go_without_plan(options: PlannerOptions, place: Placement) -> bool:
    """Whether a pass may run without asking what memory is free, if it is small."""
    if options.budget_bytes is not None or options.pinned or options.watched:
        return False
    if place.results_given or place.rescaled_grad_bytes is not None:
        return False
    return place.lse_here and place.same_dtype


def is_small(problem: Problem, device: torch.device) -> bool:
    """Whether one kernel call takes the pass and is so short that no plan is worth its
    time.

    A model that decodes makes a call of a new length every time, so lengths are rounded
    up before answers are looked up or remembered.
    """
    shape = problem.shape
    if not problem.place.in_place:
        return False
    # A kernel's own mask is defined for these lengths only: they cannot be rounded.
    if problem.pairs.verdict is None:
        problem = replace(problem, shape=_rounded(shape))
    if problem.kernel.priced_as is not None:
        problem = replace(problem, kernel=problem.kernel.priced_as)
    return (
        short_call(problem, hardware_of(device, shape.dtype, shape.head_dim))
        is not None
    )


def _rounded(shape: CallShape) -> CallShape:
    """Return ``shape`` with its lengths rounded up to powers of two.

    A causal call that is not square is returned as it is: other lengths would keep
    other pairs.
    """
    if shape.is_causal and shape.n_queries != shape.n_keys:
        return shape
    return replace(
        shape,
        n_queries=_power_of_two(shape.n_queries),
        n_keys=_power_of_two(shape.n_keys),
    )


def _power_of_two(n_tokens: int) -> int:
    return max(policy.MIN_ROUNDED_TOKENS, 1 << (n_tokens - 1).bit_length())


def _constraints(options: PlannerOptions) -> PlanConstraints:
    """Return what a schedule has to be for a call with these options."""
    budget = options.available_bytes
    constraints = PlanConstraints(
        usable_bytes(options.device) if budget is None else budget,
        depth=options.depth,
        accumulator=options.accumulator,
        pinned=options.pinned,
        # A pinned depth without a budget is run even where it is not expected to fit.
        enforce_budget=budget is not None or not options.pinned,
    )
    if options.plan is None:
        return constraints
    if isinstance(options.plan.schedule.route, Streaming):
        # Its levels are of tasks that take over if memory runs out: they say nothing
        # about a good plan of the other pass, which the budget alone restricts.
        return replace(constraints, enforce_budget=True)
    decomposition = options.plan.decomposition
    return replace(
        constraints,
        levels=decomposition.levels,
        layout=decomposition.layout,
        tile=decomposition.tile,
    )


def usable_bytes(device: torch.device) -> int:
    """Return the bytes that a call may take without a budget: what is free, less a
    margin."""
    backend = backend_of(device)
    if not backend.is_here():
        return policy.ASSUMED_DEVICE_BYTES
    free = int(backend.free_bytes(device) * (1 - policy.FREE_MEMORY_MARGIN))
    # Rounded down in steps of a few per cent: a remembered plan still serves when a
    # little more or less is free.
    step = 1 << max(0, free.bit_length() - 6)
    return free // step * step


def _check_budget(plan: Plan, budget: int | None) -> None:
    """Check the budget given beside a plan, and the plan's own.

    The plan may take more than planned where this call's mask keeps more pairs than the
    mask that it was made for.

    Raises:
        BudgetError: names the bytes that the plan takes.
    """
    for limit, name in ((budget, "a budget"), (plan.budget_bytes, "the plan's budget")):
        if limit is not None and plan.peak_bytes > limit:
            raise BudgetError(
                f"{name} of {format_bytes(limit)} ({limit} bytes) is too small for the "
                f"plan given, which takes {format_least(plan.peak_bytes)} "
                f"({plan.peak_bytes} bytes)",
                smallest_bytes=plan.peak_bytes,
            )
