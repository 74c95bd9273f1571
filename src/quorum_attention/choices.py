"""The kernel and the plan of one pass of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from quorum_attention.call.options import Options
from quorum_attention.errors import BudgetError
from quorum_attention.execution.memory import available_bytes
from quorum_attention.execution.upstream import divided_bytes, outreaches
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.protocol import CallShape, InnerKernel
from quorum_attention.kernels.registry import why_not
from quorum_attention.kernels.select import rivals, select_kernel, unrounded_kernel
from quorum_attention.planner.calibration import machine_of
from quorum_attention.planner.footprint import Placement
from quorum_attention.planner.plan import Plan
from quorum_attention.planner.rivals import quickest
from quorum_attention.planner.search import Candidate, Request, choose, refitted, undivided
from quorum_attention.planner.small import is_small
from quorum_attention.sizes import format_bytes

# Of what is free, this much is left alone when no budget is given.
_MARGIN = 0.1


def check_plan(plan: Plan | None, work: Workload) -> None:
    """Refuse a plan for another call, naming what differs."""
    if plan is None:
        return
    for name in (
        "n_queries", "n_keys", "heads", "kv_heads", "head_dim", "value_dim", "batch", "dtype",
        "is_causal",
    ):  # fmt: skip
        planned, came = getattr(plan.work, name), getattr(work, name)
        if planned != came:
            raise ValueError(f"plan was made for {name} = {planned}, the call has {came}")


def _budget(options: Options) -> int:
    if options.budget_bytes is not None:
        return options.budget_bytes
    free = int(available_bytes(options.device) * (1 - _MARGIN))
    # In steps of a few per cent, so that a plan is found again when a little more is free.
    step = 1 << max(0, free.bit_length() - 6)
    return free // step * step


def _check_budget(plan: Plan, budget: int | None) -> None:
    """A plan pins everything, but a budget given beside it still holds, and so does its own: its
    tasks are larger where this call's mask keeps more than the one it was made for."""
    for limit, what in ((budget, "a budget"), (plan.budget_bytes, "the plan's budget")):
        if limit is not None and plan.peak_bytes > limit:
            raise BudgetError(
                f"{what} of {format_bytes(limit)} ({limit} bytes) is too small for the plan given, "
                f"which takes {format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes)",
                smallest_bytes=plan.peak_bytes,
            )


def _plan(
    work: Workload,
    options: Options,
    kernel: InnerKernel,
    place: Placement,
    *,
    backward: bool,
) -> Plan:
    """The plan of one pass under the call's options."""
    machine = machine_of(options.device, work.dtype, work.head_dim)
    given = options.plan
    if given is not None and given.backward == backward:
        fitted = refitted(
            given.candidate, work, kernel, given.place, place, machine, backward=backward,
            same_work=replace(given.work, batch_shape=work.batch_shape) == work,
        )  # fmt: skip
        given = replace(given, candidate=fitted)
        _check_budget(given, options.budget_bytes)
        return given
    found = choose(work, _request(options), kernel, place, machine, backward=backward)
    return Plan(work, found, place, kernel.name, options.budget_bytes, backward)


def check_both_passes(
    work: Workload, options: Options, shape: CallShape, place: Placement, out_is_copied: bool
) -> None:
    """Refuse a budget that the forward or the backward after it does not fit in, before either.

    Args:
        place: the forward's.
        out_is_copied: operators cannot take the output as it lies, or will lie.

    Raises:
        BudgetError: says which pass, and what would do for both.
    """
    result = place.result_dtype
    # Whatever autograd hands over: an expanded gradient is copied.
    divided = outreaches(result, work.dtype)
    after = replace(
        place,
        results_given=False,
        result_dtype=work.dtype,
        copied=(not divided) + out_is_copied,
        copied_bytes=divided_bytes(result, work) if place.resident else 0,
        divided=divided,
    )
    refused: list[tuple[int, str]] = []
    for backward in (False, True):
        try:
            where = after if backward else place
            kernel = kernel_of(work, options, shape, where, result, backward=backward)
            _plan(work, options, kernel, where, backward=backward)
        except BudgetError as error:
            name = "backward" if backward else "forward"
            refused.append((error.smallest_bytes or 0, f"{name} pass: {error}"))
    if refused:
        smallest, words = max(refused)
        raise BudgetError(words, smallest_bytes=smallest or None)


def _request(options: Options) -> Request:
    given = options.plan
    return Request(
        budget_bytes=_budget(options),
        levels=given.levels if given is not None else None,
        depth=options.depth,
        layout=given.decomposition.layout if given is not None else "aligned",
        tile=given.decomposition.tile if given is not None else 128,
        accumulator=options.accumulator,
        pinned=options.depth is not None or given is not None,
        # Without a budget a pinned depth is tried as it is: that is what pinning is for.
        enforce_budget=options.budget_bytes is not None
        or (options.depth is None and given is None),
    )


def kernel_of(
    work: Workload,
    options: Options,
    shape: CallShape,
    place: Placement,
    result: torch.dtype,
    *,
    backward: bool,
) -> InnerKernel:
    """The kernel of a pass: the one asked for (a plan asks for its own), or else the planner's."""
    wanted = unrounded_kernel(options.kernel, shape, options.device, result)
    preferred = select_kernel(wanted, shape, options.device)
    if wanted != "auto" or _short_plan(work, options, preferred, place, backward=backward):
        return preferred
    others = rivals(preferred, shape, options.device)
    if not others:
        return preferred
    return quickest(
        work,
        _request(options),
        preferred,
        others,
        place,
        machine_of(options.device, work.dtype, work.head_dim),
        backward=backward,
        believed=lambda kernel: why_not(kernel, shape, options.device) is None,
    )


def small_kernel(
    work: Workload,
    options: Options,
    shape: CallShape,
    place: Placement,
    result: torch.dtype,
    *,
    backward: bool,
) -> InnerKernel | None:
    """The kernel that runs a pass whole and without a plan; None where one has to be made."""
    pinned = options.plan is not None or options.depth is not None
    if pinned or options.budget_bytes is not None or options.report is not None or options.progress:
        return None
    if place.results_given or place.divided:
        return None
    wanted = unrounded_kernel(options.kernel, shape, options.device, result)
    kernel = select_kernel(wanted, shape, options.device)
    small = is_small(work, kernel, place, options.device, backward=backward)
    return kernel if small else None


def _short_plan(
    work: Workload, options: Options, kernel: InnerKernel, place: Placement, *, backward: bool
) -> Candidate | None:
    """The monolithic call, where it is so short that it is tried without planning."""
    if options.budget_bytes is not None or options.plan is not None or options.depth is not None:
        return None
    machine = machine_of(options.device, work.dtype, work.head_dim)
    return undivided(work, kernel, place, machine, backward=backward)


def plans_of(
    work: Workload,
    options: Options,
    kernel: InnerKernel,
    place: Placement,
    *,
    backward: bool,
) -> Iterator[Plan]:
    """The plan to run, and before it one that is tried without planning.

    A short call is not worth asking how much memory is free: where it runs out, the next is.
    """
    found = _short_plan(work, options, kernel, place, backward=backward)
    if found is not None:
        yield Plan(work, found, place, kernel.name, None, backward)
    yield _plan(work, options, kernel, place, backward=backward)
