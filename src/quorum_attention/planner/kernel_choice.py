"""Chooses a kernel together with its plan.

The preferred kernel is the fastest on a call that runs whole. On a call that is cut
into many small tasks, a kernel that takes a task in one launch can be faster: under a
tight budget, time goes into issuing calls, and a workspace may leave no room for a
second slot (docs/planner.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from quorum_attention.errors import BudgetError
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.routes.whole import Whole
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.planner import policy
from quorum_attention.planner.constraints import PlanConstraints
from quorum_attention.planner.hardware import HardwareModel
from quorum_attention.planner.plan import Plan
from quorum_attention.planner.price import kernel_hardware, least_seconds
from quorum_attention.planner.search import choose


def choose_plan(
    problem: Problem,
    constraints: PlanConstraints,
    other_kernels: Iterable[InnerKernel],
    hardware: HardwareModel,
    *,
    kernel_works: Callable[[InnerKernel], bool],
) -> tuple[InnerKernel, Plan]:
    """Return a kernel and its plan.

    The kernel is the problem's, unless another one is predicted to be clearly faster,
    or only that one fits.

    Args:
        other_kernels: other kernels that take the call.
        kernel_works: whether a kernel works here. Asked last, because it may build the
            kernel.

    Raises:
        BudgetError: none fits; names the smallest budget that would do.
    """
    choice: tuple[InnerKernel, Plan] | None = None
    errors: list[BudgetError] = []
    for kernel in (problem.kernel, *other_kernels):
        is_preferred = kernel is problem.kernel
        candidate = replace(problem, kernel=kernel)
        seconds_to_beat = math.inf
        if choice is not None:
            best_kernel, best_plan = choice
            seconds_to_beat = _seconds_to_beat(
                best_plan, is_preferred=best_kernel is problem.kernel
            )
        kernel_rates = kernel_hardware(candidate, hardware)
        if least_seconds(candidate, kernel_rates) >= seconds_to_beat:
            continue  # whatever a search found, it would not be taken
        try:
            plan = choose(candidate, constraints, hardware)
        except BudgetError as error:
            if choice is None and (is_preferred or kernel_works(kernel)):
                # The smallest budget that an error names has to work: only of kernels
                # that work here. The traceback's frames hold tensors of the caller.
                errors.append(error.with_traceback(None))
            continue
        is_faster = plan.predicted_seconds < seconds_to_beat
        if is_faster and (is_preferred or kernel_works(kernel)):
            choice = kernel, plan
    if choice is not None:
        return choice
    try:
        raise min(errors, key=_bytes_needed)
    finally:
        # The error's traceback holds this frame: with the error in it, tensors of the
        # caller would stay until cycles are looked for.
        del errors


def _seconds_to_beat(plan: Plan, *, is_preferred: bool) -> float:
    """Return seconds that the plan of another kernel has to be below; 0 is not worth a
    search.

    Args:
        is_preferred: whether ``plan`` is that of the preferred kernel.
    """
    if not is_preferred:
        return plan.predicted_seconds
    is_whole = isinstance(plan.schedule.route, Whole)
    if is_whole or plan.predicted_seconds < policy.MIN_SECONDS_TO_BUILD_KERNEL:
        return 0.0
    return plan.predicted_seconds * policy.REQUIRED_TIME_SHARE_OF_KERNEL


def _bytes_needed(error: BudgetError) -> float:
    return error.smallest_bytes or math.inf
