"""Which kernel runs a pass of a call, and by which plan: decided together, in one place.

The preferred kernel is the fastest on a call that runs whole. On a call that is cut into many small
tasks, a kernel that takes a task in one launch can be faster: under a tight budget, time goes into
issuing calls, and a workspace may leave no room for a second slot (docs/planner.md).

A short pass is run without a plan, which would take longer than the pass, or without asking how
much memory is free. If it runs out of memory, it is decided again (``decide_again``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from quorum_attention.errors import BudgetError
from quorum_attention.execution.case import Case, PassSpec, Placement, spec_of
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.routes.over_inputs import Whole
from quorum_attention.execution.trimming import pairs_of
from quorum_attention.execution.workload import GroupSize, Workload
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.protocol import CallShape, InnerKernel
from quorum_attention.kernels.registry import rivals, select_kernel, unrounded_kernel, why_not
from quorum_attention.planner import policy
from quorum_attention.planner.calibration import hardware_of, rates_known
from quorum_attention.planner.hardware import HardwareModel
from quorum_attention.planner.plan import Options, Plan
from quorum_attention.planner.price import (
    Candidate,
    footprint_of,
    forward_flops,
    kernel_hardware,
    least_seconds,
)
from quorum_attention.planner.search import (
    PlanConstraints,
    choose,
    refitted,
    short_monolithic,
    uncut,
)
from quorum_attention.sizes import format_bytes, format_least

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Problem:
    """One pass of a call, as far as a decision depends on it.

    Attributes:
        work: the call's sizes.
        options: what its caller asked for.
        place: where its tensors are.
        result: dtype of the output, as the forward returns it.
        needs_grad: whether this pass is a backward, or a backward follows it.
        backward: whether this pass is a backward.
        together: whether all that a backward reads has one dtype and is on the computing device.
    """

    work: Workload
    options: Options
    place: Placement
    result: torch.dtype
    needs_grad: bool
    backward: bool
    together: bool = True

    @property
    def call_shape(self) -> CallShape:
        """The sizes that kernels are asked about."""
        return self.work.call_shape(self.options.device.type, self.needs_grad)

    @property
    def spec(self) -> PassSpec:
        """Forward or backward."""
        return spec_of(self.backward)

    @property
    def hardware(self) -> HardwareModel:
        """The rates of the device that computes."""
        return hardware_of(self.options.device, self.work.dtype, self.work.head_dim)

    def case(self, kernel: InnerKernel) -> Case:
        """The pass by ``kernel``."""
        return Case(self.work, kernel, self.spec, self.place)


@dataclass(frozen=True, slots=True)
class Decision:
    """How a pass is run.

    Attributes:
        kernel: what computes.
        plan: None runs the pass as one kernel call on the inputs as they lie, without a report.
        last: whether running out of memory is final; if not, ``decide_again``.
    """

    kernel: InnerKernel
    plan: Plan | None = None
    last: bool = False


def decide(problem: Problem) -> Decision:
    """How to run a pass.

    Raises:
        BudgetError: nothing fits; names the smallest budget that would do.
        NotImplementedError: no kernel, or not the one asked for, can run the call.
    """
    options, place = problem.options, problem.place
    free = options.free and not (options.watched or place.results_given or place.is_divided)
    if free and problem.together and place.in_place:
        kernel = _preferred(problem)
        if is_small(problem.work, kernel, place, options.device, backward=problem.backward):
            return Decision(kernel)
    return _by_plan(problem)


def decide_again(problem: Problem, failed: Decision) -> Decision:
    """How to run a pass for which ``failed`` ran out of memory; ``failed.last`` is False."""
    return _by_plan(problem) if failed.plan is None else _planned(problem, failed.kernel)


def decide_both(forward: Problem, backward: Problem, *, beside: int = 0) -> Decision:
    """How to run a forward whose backward has to fit the budget as well.

    Args:
        beside: bytes of the backward's budget that something else will hold then.

    Raises:
        BudgetError: one of them does not fit; names the pass, and a budget that would do for both.
    """
    if beside and backward.options.budget_bytes is not None:
        left = max(0, backward.options.budget_bytes - beside)
        backward = replace(backward, options=replace(backward.options, budget_bytes=left))
    # The backward is decided again when its turn comes.
    decision, _ = both_passes(lambda back: decide((forward, backward)[back]), beside)
    return decision


def both_passes(of: Callable[[bool], _Found], beside: int = 0) -> tuple[_Found, _Found]:
    """What ``of`` finds for a forward and for a backward within one budget.

    Args:
        of: given whether it is the backward.
        beside: bytes of the backward's budget that the mask's gradient will hold.

    Raises:
        BudgetError: one of them does not fit; names the pass that needs more, and a budget that
            does for both.
    """
    found: list[_Found] = []
    refused: list[tuple[int, str]] = []
    for backward, name, held in ((False, "forward", 0), (True, "backward", beside)):
        try:
            found.append(of(backward))
        except BudgetError as error:
            smallest = (error.smallest_bytes or -held) + held
            words = f"{name} pass"
            if held:
                words += (
                    f", beside {format_bytes(held)} of the mask's gradient: the smallest that "
                    f"works for both is {format_least(smallest)} ({smallest} bytes)"
                )
            refused.append((smallest, f"{words}: {error}"))
    if refused:
        smallest, words = max(refused)
        raise BudgetError(words, smallest_bytes=smallest or None)
    return found[0], found[1]


def decide_untried(
    work: Workload,
    constraints: PlanConstraints,
    kernel: str | InnerKernel,
    place: Placement,
    device: torch.device,
    *,
    backward: bool,
) -> tuple[InnerKernel, Candidate]:
    """Kernel and schedule of a call without tensors, on a ``device`` that need not be available.
    Kernels are not tried out: ``kernel_works`` for all of them.

    Raises:
        BudgetError, NotImplementedError: as ``decide``.
    """
    call_shape = work.call_shape(device.type, backward)
    preferred = select_kernel(kernel, call_shape, device, tried=False, flops=forward_flops(work))
    others = rivals(preferred, call_shape, device) if kernel == "auto" else ()
    hardware = hardware_of(device, work.dtype, work.head_dim)
    case = Case(work, preferred, spec_of(backward), place)
    return choose_plan(case, constraints, others, hardware, kernel_works=lambda _: True)


# --- Without a plan ---------------------------------------------------------------------------


def is_small(
    work: Workload, kernel: InnerKernel, place: Placement, device: torch.device, *, backward: bool
) -> bool:
    """Whether ``kernel`` takes the call whole, and the call is so short that no plan is worth its
    time.

    A model that decodes makes a call of a new length every time, so lengths are rounded up before
    answers are looked up or remembered.
    """
    if not place.in_place or len(work.batch_shape) > 1:
        return False
    # A kernel's own mask is defined for these lengths only: they cannot be rounded.
    own_mask = pairs_of(work, kernel).verdict is not None
    rounded, rates, spec = work if own_mask else _rounded(work), rates_known(), spec_of(backward)
    if _fits_whole(rounded, kernel, place, device, spec, rates):
        return True
    # The rounded call may be too long where the call itself is not. On a CPU that does not matter:
    # there a planned call is as quick.
    return place.backend.refuses and _fits_whole(work, kernel, place, device, spec, rates)


def _rounded(work: Workload) -> Workload:
    """``work`` with its lengths rounded up to powers of two. A causal call that is not square is
    returned as it is: other lengths would keep other pairs."""
    if work.is_causal and work.n_queries != work.n_keys:
        return work
    n_queries, n_keys = (
        max(policy.SHORTEST, 1 << (n - 1).bit_length()) for n in (work.n_queries, work.n_keys)
    )
    if (n_queries, n_keys) == (work.n_queries, work.n_keys):
        return work
    return replace(work, n_queries=n_queries, n_keys=n_keys)


@remembered(256)
def _fits_whole(
    work: Workload,
    kernel: InnerKernel,
    place: Placement,
    device: torch.device,
    spec: PassSpec,
    rates: object,
) -> bool:
    """The answer by the rates that ``rates`` stands for, and to be asked again after others."""
    if place.backend.refuses:
        hardware = hardware_of(device, work.dtype, work.head_dim)
        return short_monolithic(work, kernel, place, spec, hardware) is not None
    schedule = uncut(work, GroupSize(work.batch, work.kv_heads))
    case = Case(work, kernel, spec, place)
    return schedule.runs(case) and footprint_of(schedule, case).total <= policy.WHOLE_BYTES


# --- With a plan ------------------------------------------------------------------------------


def _by_plan(problem: Problem) -> Decision:
    """A decision with a plan: the monolithic call where it is short, otherwise by a search."""
    work, options, place = problem.work, problem.options, problem.place
    preferred = _preferred(problem)
    if options.free:
        # A short call is not worth asking how much memory is free.
        short = short_monolithic(work, preferred, place, problem.spec, problem.hardware)
        if short is not None:
            plan = Plan(work, short, place, preferred.name, None, problem.backward)
            return Decision(preferred, plan)
    # Where the result's dtype already decides on a kernel, no others are compared.
    shape, device = problem.call_shape, options.device
    any_kernel = unrounded_kernel(options.kernel, shape, device, problem.result) == "auto"
    return _planned(problem, preferred, rivals(preferred, shape, device) if any_kernel else ())


def _planned(
    problem: Problem, preferred: InnerKernel, others: Iterable[InnerKernel] = ()
) -> Decision:
    """A decision by the plan given, or by a search within the budget."""
    work, options, place, backward = problem.work, problem.options, problem.place, problem.backward
    case, given = problem.case(preferred), options.plan
    if given is not None and given.backward == backward:
        same = replace(given.work, batch_shape=work.batch_shape) == work
        fitted = refitted(given.candidate, case, given.place, problem.hardware, same_work=same)
        plan = replace(given, candidate=fitted)
        _check_budget(plan, options.budget_bytes)
        return Decision(preferred, plan, last=True)
    kernel, candidate = choose_plan(
        case, _constraints(options), others, problem.hardware,
        kernel_works=lambda kernel: why_not(kernel, problem.call_shape, options.device) is None,
    )  # fmt: skip
    plan = Plan(work, candidate, place, kernel.name, options.budget_bytes, backward)
    return Decision(kernel, plan, last=True)


def _preferred(problem: Problem) -> InnerKernel:
    """The kernel asked for (a plan asks for its own), or the first that can run the call."""
    device, call_shape = problem.options.device, problem.call_shape
    wanted = unrounded_kernel(problem.options.kernel, call_shape, device, problem.result)
    return select_kernel(wanted, call_shape, device, flops=forward_flops(problem.work))


def choose_plan(
    case: Case,
    constraints: PlanConstraints,
    others: Iterable[InnerKernel],
    hardware: HardwareModel,
    *,
    kernel_works: Callable[[InnerKernel], bool],
) -> tuple[InnerKernel, Candidate]:
    """A kernel and its schedule: the case's, unless one of ``others`` is predicted to be clearly
    faster, or only that one fits.

    Args:
        others: other kernels that take the call.
        kernel_works: whether a kernel works here. Asked last, because it may build the kernel.

    Raises:
        BudgetError: none fits; names the smallest budget that would do.
    """
    failure: BudgetError | None = None
    best: tuple[InnerKernel, Candidate] | None = None
    try:
        best = case.kernel, choose(case, constraints, hardware)
        route, seconds = best[1].schedule.route, best[1].cost.seconds
        if isinstance(route, Whole) or seconds < policy.WORTH_BUILDING:
            return best
    except BudgetError as error:
        # Its traceback would hold this frame, and so the caller's tensors, until cycles are looked
        # for.
        failure = error.with_traceback(None)
    for kernel in others:
        other = replace(case, kernel=kernel)
        limit = math.inf
        if best is not None:
            # Of the best schedule's time, what another has to be below.
            share = policy.CLEARLY_ANOTHER_KERNEL if best[0] is case.kernel else 1.0
            limit = best[1].cost.seconds * share
            if least_seconds(other, kernel_hardware(other, hardware)) >= limit:
                continue  # whatever a search found, it would not be taken
        try:
            found = choose(other, constraints, hardware)
        except BudgetError as error:
            # The smallest budget that an error names has to work: only of kernels that work here.
            if best is None and kernel_works(kernel):
                failure = min(failure or error, error, key=_named_bytes).with_traceback(None)
            continue
        if found.cost.seconds < limit and kernel_works(kernel):
            best = kernel, found
    if best is not None:
        return best
    assert failure is not None, "the preferred kernel either fits or does not"
    try:
        raise failure
    finally:
        failure = None


def _named_bytes(error: BudgetError) -> float:
    """The smallest budget that an error names."""
    return math.inf if error.smallest_bytes is None else error.smallest_bytes


def _constraints(options: Options) -> PlanConstraints:
    given = options.plan
    return PlanConstraints(
        budget_bytes=_budget(options),
        levels=given.levels if given is not None else None,
        depth=options.depth,
        layout=given.decomposition.layout if given is not None else "aligned",
        tile=given.decomposition.tile if given is not None else 128,
        accumulator=options.accumulator,
        pinned=options.pinned,
        # A pinned depth without a budget is run even where it is not expected to fit.
        enforce_budget=options.budget_bytes is not None or not options.pinned,
    )


def _budget(options: Options) -> int:
    """Device bytes that a pass may take: the budget given, or what is free less a margin."""
    if options.budget_bytes is not None:
        return options.budget_bytes
    free = int(backend_of(options.device).free_bytes(options.device) * (1 - policy.MARGIN))
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
