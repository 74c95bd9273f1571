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
from quorum_attention.execution.case import Case, Placement
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.routes.whole import Whole
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.launches import compile_ahead
from quorum_attention.kernels.probe import read_memo
from quorum_attention.kernels.protocol import CallShape, InnerKernel
from quorum_attention.kernels.registry import why_not
from quorum_attention.kernels.select import rivals, select_kernel, unrounded_kernel
from quorum_attention.planner import policy
from quorum_attention.planner.calibration import machine_of
from quorum_attention.planner.cost import forward_flops
from quorum_attention.planner.machine import Machine
from quorum_attention.planner.options import Options
from quorum_attention.planner.plan import Plan
from quorum_attention.planner.search import (
    Candidate,
    Wish,
    choose,
    least,
    prepared,
    refitted,
    short_monolithic,
)
from quorum_attention.planner.small import is_small
from quorum_attention.sizes import format_bytes, format_least

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Asked:
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


def decide(asked: Asked) -> Decision:
    """How to run a pass.

    Raises:
        BudgetError: nothing fits; names the smallest budget that would do.
        NotImplementedError: no kernel, or not the one asked for, can run the call.
    """
    whole = _whole(asked)
    return _by_plan(asked) if whole is None else Decision(whole)


def decide_again(asked: Asked, failed: Decision) -> Decision:
    """How to run a pass for which ``failed`` ran out of memory; ``failed.last`` is False."""
    return _by_plan(asked) if failed.plan is None else _planned(asked, failed.kernel)


def decide_both(forward: Asked, backward: Asked, *, beside: int = 0) -> Decision:
    """How to run a forward whose backward has to fit the budget as well.

    Args:
        beside: bytes of the backward's budget that something else will hold then.

    Raises:
        BudgetError: one of them does not fit; names the pass, and a budget that would do for both.
    """
    if beside and backward.options.budget_bytes is not None:
        left = max(0, backward.options.budget_bytes - beside)
        backward = replace(backward, options=replace(backward.options, budget_bytes=left))
    _prepare(forward)
    # The backward is decided again when its turn comes.
    found, _ = both_passes(lambda back: decide((forward, backward)[back]), beside)
    return found


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
    wish: Wish,
    kernel: str | InnerKernel,
    place: Placement,
    device: torch.device,
    *,
    backward: bool,
) -> tuple[InnerKernel, Candidate]:
    """Kernel and schedule of a call without tensors, on a ``device`` that need not be available.
    Kernels are not tried out: what they declare is believed.

    Raises:
        BudgetError, NotImplementedError: as ``decide``.
    """
    call_shape = work.call_shape(device.type, backward)
    preferred = select_kernel(kernel, call_shape, device, tried=False, flops=forward_flops(work))
    others = rivals(preferred, call_shape, device) if kernel == "auto" else ()
    machine = machine_of(device, work.dtype, work.head_dim)
    chosen, found = quickest(
        work, wish, preferred, others, place, machine, backward=backward, believed=lambda _: True
    )
    return chosen, prepared(found, Case(work, chosen, spec_of(backward), place), machine)


# --- Without a plan ---------------------------------------------------------------------------


def _whole(asked: Asked) -> InnerKernel | None:
    """The kernel that runs a pass whole and without a plan; None where it needs a plan."""
    options, place = asked.options, asked.place
    if not options.free or options.watched or place.results_given or place.is_divided:
        return None
    return _small_kernel(asked) if asked.together else None


def _small_kernel(asked: Asked) -> InnerKernel | None:
    """The preferred kernel, if it can run the pass whole and the pass is small enough."""
    if not asked.place.in_place:
        return None
    kernel = _preferred(asked)
    device = asked.options.device
    small = is_small(asked.work, kernel, asked.place, device, backward=asked.backward)
    return kernel if small else None


# --- With a plan ------------------------------------------------------------------------------


def _by_plan(asked: Asked) -> Decision:
    """A decision with a plan: the monolithic call where it is short, otherwise by a search."""
    work, options, place, backward = asked.work, asked.options, asked.place, asked.backward
    _prepare(asked)
    preferred = _preferred(asked)
    if options.free:
        # A short call is not worth asking how much memory is free.
        machine = machine_of(options.device, work.dtype, work.head_dim)
        short = short_monolithic(work, preferred, place, machine, backward=backward)
        if short is not None:
            return Decision(preferred, Plan(work, short, place, preferred.name, None, backward))
    call_shape, device = asked.call_shape, options.device
    # Where the result's dtype already decides on a kernel, no others are compared.
    free = unrounded_kernel(options.kernel, call_shape, device, asked.result) == "auto"
    others = rivals(preferred, call_shape, device) if free else ()
    return _planned(asked, preferred, others)


# Kinds of calls for which it has been begun: there are few.
_PREPARED: set[tuple[torch.device, torch.dtype, int, int, bool | None]] = set()


def _prepare(asked: Asked) -> None:
    """Begin what a first call of a kind waits for, beside planning it."""
    work, options, place = asked.work, asked.options, asked.place
    if place.in_place and options.budget_bytes is None:
        return
    # It will probably be cut.
    scaled = work.dtype == torch.float16 if asked.needs_grad else None
    kind = options.device, work.dtype, work.head_dim, work.value_dim, scaled
    if kind in _PREPARED:
        return
    _PREPARED.add(kind)
    backend = backend_of(options.device)
    if backend.remembers and backend.is_here():
        # Threads that import hold the interpreter's lock, 5 ms at a time, and reading a file
        # gives it away: a hundred small files would take half a second beside them.
        read_memo()
    backend.prepare(options.device)
    compile_ahead(*kind)


def _planned(asked: Asked, preferred: InnerKernel, others: Iterable[InnerKernel] = ()) -> Decision:
    """A decision by the plan given, or by a search within the budget."""
    work, options, place, backward = asked.work, asked.options, asked.place, asked.backward
    machine = machine_of(options.device, work.dtype, work.head_dim)
    given = options.plan
    if given is not None and given.backward == backward:
        case = Case(work, preferred, spec_of(backward), place)
        same = replace(given.work, batch_shape=work.batch_shape) == work
        fitted = refitted(given.candidate, case, given.place, machine, same_work=same)
        plan = replace(given, candidate=fitted)
        _check_budget(plan, options.budget_bytes)
        return Decision(preferred, plan, last=True)

    kernel, found = quickest(
        work, _wish(options), preferred, others, place, machine, backward=backward,
        believed=lambda kernel: why_not(kernel, asked.call_shape, options.device) is None,
    )  # fmt: skip
    found = prepared(found, Case(work, kernel, spec_of(backward), place), machine)
    made = Plan(work, found, place, kernel.name, options.budget_bytes, backward)
    return Decision(kernel, made, last=True)


def _preferred(asked: Asked) -> InnerKernel:
    """The kernel asked for (a plan asks for its own), or the first that can run the call."""
    device, call_shape = asked.options.device, asked.call_shape
    wanted = unrounded_kernel(asked.options.kernel, call_shape, device, asked.result)
    return select_kernel(wanted, call_shape, device, flops=forward_flops(asked.work))


def quickest(
    work: Workload,
    wish: Wish,
    preferred: InnerKernel,
    others: Iterable[InnerKernel],
    place: Placement,
    machine: Machine,
    *,
    backward: bool,
    believed: Callable[[InnerKernel], bool],
) -> tuple[InnerKernel, Candidate]:
    """A kernel and its schedule: ``preferred``, unless one of ``others`` is predicted to be clearly
    faster, or only that one fits.

    Args:
        others: other kernels that take the call.
        believed: whether a kernel works here. Asked last, because it may build the kernel.

    Raises:
        BudgetError: none fits; names the smallest budget that would do.
    """
    failure: BudgetError | None = None
    best: tuple[InnerKernel, Candidate] | None = None
    try:
        found = choose(work, wish, preferred, place, machine, backward=backward)
        best = preferred, found
        if isinstance(found.schedule.route, Whole) or found.cost.seconds < policy.WORTH_BUILDING:
            return best
    except BudgetError as error:
        # Its traceback would hold this frame, and so the caller's tensors, until cycles are looked
        # for.
        failure = error.with_traceback(None)
    for kernel in others:
        if best is not None:
            floor = least(work, kernel, machine, backward=backward)
            if floor >= best[1].cost.seconds * _share(best[0], preferred):
                continue  # whatever a search found, it would not be taken
        try:
            found = choose(work, wish, kernel, place, machine, backward=backward)
        except BudgetError as error:
            # The smallest budget that an error names has to work: only of kernels that work here.
            if best is None and believed(kernel):
                failure = min(failure or error, error, key=_named_bytes).with_traceback(None)
            continue
        if best is not None and not _is_faster(found, *best, preferred):
            continue
        if believed(kernel):
            best = kernel, found
    if best is not None:
        return best
    assert failure is not None, "the preferred kernel either fits or does not"
    try:
        raise failure
    finally:
        failure = None


def _is_faster(
    found: Candidate, kernel: InnerKernel, best: Candidate, preferred: InnerKernel
) -> bool:
    """Whether ``found`` replaces ``best``, which is ``kernel``'s."""
    return found.cost.seconds < best.cost.seconds * _share(kernel, preferred)


def _share(kernel: InnerKernel, preferred: InnerKernel) -> float:
    """Of the predicted time of the best schedule, ``kernel``'s: what another has to be below."""
    return policy.CLEARLY_ANOTHER_KERNEL if kernel is preferred else 1.0


def _named_bytes(error: BudgetError) -> float:
    """The smallest budget that an error names."""
    return math.inf if error.smallest_bytes is None else error.smallest_bytes


def _wish(options: Options) -> Wish:
    given = options.plan
    return Wish(
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
