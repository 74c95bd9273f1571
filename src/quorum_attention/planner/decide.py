"""Which kernel runs a pass of a call, and by which plan: decided together, in one place.

The preferred kernel is the fastest on a call that runs whole. On a call that is cut into many small
tasks, a kernel that takes a task in one launch can be faster: under a tight budget, time goes into
issuing calls, and a workspace may leave no room for a second slot (docs/planner.md).

A short pass is run without a plan, which would take longer than the pass. If it runs out of memory,
it is planned after all (``with_plan``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.problem import Placement, Problem
from quorum_attention.execution.routes.whole import Whole
from quorum_attention.kernels.protocol import CallShape, InnerKernel
from quorum_attention.kernels.select import rivals, select_kernel, unrounded_kernel, why_not
from quorum_attention.planner import policy
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.planner.constraints import PlanConstraints
from quorum_attention.planner.hardware import HardwareModel
from quorum_attention.planner.plan import Plan, PlannerOptions
from quorum_attention.planner.price import forward_flops, kernel_hardware, least_seconds
from quorum_attention.planner.search import choose, refit, short_call
from quorum_attention.units import format_bytes, format_least

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Decision:
    """How a pass is run.

    Attributes:
        problem: the pass, with the kernel that computes it.
        options: what its caller asked for.
        asked_shape: what kernels were asked about, to be chosen.
        any_kernel: whether another kernel may be chosen instead.
        plan: None runs the pass as one kernel call on the inputs as they lie, without a report.
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
    result: torch.dtype,
    *,
    backward: bool = False,
    needs_grad: bool = False,
) -> Decision:
    """How to run a pass.

    Args:
        result: dtype of the output, as the forward returns it. It goes into the choice of the
            kernel in both passes, so that they take the same one.
        needs_grad: whether a backward follows this forward.

    Raises:
        BudgetError: nothing fits; names the smallest budget that would do.
        NotImplementedError: no kernel, or not the one asked for, can run the call.
    """
    device = options.device
    asked_shape = replace(shape, needs_grad=needs_grad or backward)
    # A plan asks for its own kernel.
    wanted = unrounded_kernel(options.kernel, asked_shape, device, result)
    kernel = select_kernel(wanted, asked_shape, device, flops=forward_flops(shape))
    problem = Problem(shape, kernel, spec_of(backward), place)
    decision = Decision(problem, options, asked_shape, wanted == "auto")
    free = options.free and place.rescaled_grad_bytes is None
    free = free and not (options.watched or place.results_given)
    if free and place.lse_here and place.same_dtype and is_small(problem, device):
        return decision
    return with_plan(decision)


def with_plan(decision: Decision) -> Decision:
    """The same pass with a plan: it is not small, or has run out of memory."""
    options, device = decision.options, decision.options.device
    # Plans assume that the log-sum-exp is where the device computes; where it is not, a route that
    # reads it in place is left (execution/run_pass.py).
    problem = replace(decision.problem, place=replace(decision.problem.place, lse_here=True))
    shape, kernel = problem.shape, problem.kernel
    hardware = hardware_of(device, shape.dtype, shape.head_dim)
    given = options.plan
    if given is not None and given.backward == problem.spec.backward:
        plan = replace(refit(given, problem, hardware), budget_bytes=given.budget_bytes)
        _check_budget(plan, options.budget_bytes)
        return replace(decision, plan=plan)
    asked_shape = decision.asked_shape
    kernel, plan = choose_plan(
        problem, _constraints(options),
        rivals(kernel, asked_shape, device) if decision.any_kernel else (),
        hardware, kernel_works=lambda kernel: why_not(kernel, asked_shape, device) is None,
    )  # fmt: skip
    plan = replace(plan, budget_bytes=options.budget_bytes)
    return replace(decision, problem=replace(decision.problem, kernel=kernel), plan=plan)


def both_passes(of: Callable[[bool], _Found]) -> tuple[_Found, _Found]:
    """What ``of``, given whether it is the backward, finds for both passes within one budget.

    Raises:
        BudgetError: one of them does not fit; names the pass that needs more, and a budget that
            does for both.
    """
    found: list[_Found] = []
    refused: list[tuple[int, str]] = []
    for backward, name in ((False, "forward"), (True, "backward")):
        try:
            found.append(of(backward))
        except BudgetError as error:
            refused.append((error.smallest_bytes or 0, f"{name} pass: {error}"))
    if refused:
        smallest, words = max(refused)
        raise BudgetError(words, smallest_bytes=smallest or None)
    return found[0], found[1]


# --- Without a plan ---------------------------------------------------------------------------


def is_small(problem: Problem, device: torch.device) -> bool:
    """Whether the kernel takes the call whole, and the call is so short that no plan is worth its
    time.

    A model that decodes makes a call of a new length every time, so lengths are rounded up before
    answers are looked up or remembered.
    """
    shape = problem.shape
    if not problem.place.in_place:
        return False
    # A kernel's own mask is defined for these lengths only: they cannot be rounded.
    if problem.pairs.verdict is None:
        problem = replace(problem, shape=_rounded(shape))
    return short_call(problem, hardware_of(device, shape.dtype, shape.head_dim)) is not None


def _rounded(shape: CallShape) -> CallShape:
    """``shape`` with its lengths rounded up to powers of two. A causal call that is not square is
    returned as it is: other lengths would keep other pairs."""
    if shape.is_causal and shape.n_queries != shape.n_keys:
        return shape
    n_queries, n_keys = (
        max(policy.MIN_ROUNDED_TOKENS, 1 << (n - 1).bit_length())
        for n in (shape.n_queries, shape.n_keys)
    )
    return replace(shape, n_queries=n_queries, n_keys=n_keys)


# --- With a plan ------------------------------------------------------------------------------


def choose_plan(
    problem: Problem,
    constraints: PlanConstraints,
    others: Iterable[InnerKernel],
    hardware: HardwareModel,
    *,
    kernel_works: Callable[[InnerKernel], bool],
) -> tuple[InnerKernel, Plan]:
    """A kernel and its plan: the problem's, unless one of ``others`` is predicted to be clearly
    faster, or only that one fits.

    Args:
        others: other kernels that take the call.
        kernel_works: whether a kernel works here. Asked last, because it may build the kernel.

    Raises:
        BudgetError: none fits; names the smallest budget that would do.
    """
    failure: BudgetError | None = None
    best: tuple[InnerKernel, Plan] | None = None
    for kernel in (problem.kernel, *others):
        one, preferred, limit = replace(problem, kernel=kernel), kernel is problem.kernel, math.inf
        if best is not None:
            before, is_first = best[1], best[0] is problem.kernel
            whole = isinstance(before.schedule.route, Whole)
            if is_first and (
                whole or before.predicted_seconds < policy.MIN_SECONDS_TO_BUILD_KERNEL
            ):
                break
            # Of the best plan's time, what another has to be below.
            share = policy.REQUIRED_TIME_SHARE_OF_KERNEL if is_first else 1.0
            limit = before.predicted_seconds * share
            if least_seconds(one, kernel_hardware(one, hardware)) >= limit:
                continue  # whatever a search found, it would not be taken
        try:
            found = choose(one, constraints, hardware)
        except BudgetError as error:
            # The smallest budget that an error names has to work: only of kernels that work here.
            # Its traceback would hold this frame, and so the caller's tensors, until cycles are
            # looked for.
            if preferred or (best is None and kernel_works(kernel)):
                failure = min(
                    failure or error, error, key=lambda e: e.smallest_bytes or math.inf
                ).with_traceback(None)
            continue
        if preferred or (found.predicted_seconds < limit and kernel_works(kernel)):
            best = kernel, found
    if best is not None:
        return best
    assert failure is not None, "the preferred kernel either fits or does not"
    try:
        raise failure
    finally:
        failure = None


def _constraints(options: PlannerOptions) -> PlanConstraints:
    """What a schedule has to be."""
    budget = options.budget_bytes
    found = PlanConstraints(
        usable_bytes(options.device) if budget is None else budget,
        depth=options.depth,
        accumulator=options.accumulator,
        pinned=options.pinned,
        # A pinned depth without a budget is run even where it is not expected to fit.
        enforce_budget=budget is not None or not options.pinned,
    )
    if options.plan is None:
        return found
    decomposition = options.plan.decomposition
    return replace(
        found,
        levels=decomposition.levels,
        layout=decomposition.layout,
        tile=decomposition.tile,
    )


def usable_bytes(device: torch.device) -> int:
    """What a call may take where no budget is given: what is free, less a margin."""
    backend = backend_of(device)
    if not backend.is_here():
        return policy.ASSUMED_DEVICE_BYTES
    free = int(backend.free_bytes(device) * (1 - policy.FREE_MEMORY_MARGIN))
    # Rounded down in steps of a few per cent: a remembered plan still serves when a little more or
    # less is free.
    step = 1 << max(0, free.bit_length() - 6)
    return free // step * step


def _check_budget(plan: Plan, budget: int | None) -> None:
    """Check the budget given beside a plan, and the plan's own: it may take more than planned where
    this call's mask keeps more pairs than the mask that it was made for."""
    for limit, what in ((budget, "a budget"), (plan.budget_bytes, "the plan's budget")):
        if limit is not None and plan.peak_bytes > limit:
            raise BudgetError(
                f"{what} of {format_bytes(limit)} ({limit} bytes) is too small for the plan given, "
                f"which takes {format_least(plan.peak_bytes)} ({plan.peak_bytes} bytes)",
                smallest_bytes=plan.peak_bytes,
            )
