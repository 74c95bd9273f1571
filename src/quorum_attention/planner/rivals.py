"""Which kernel a call with a free choice is planned for.

The preferred kernel is the fastest on a call that runs as a whole. Cut into many small tasks, a
kernel that takes a task in one launch can overtake it: where the budget is tight, the time goes
into issuing calls, and into workspaces that leave no room for a second slot (docs/planner.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from quorum_attention.errors import BudgetError
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.planner.footprint import Placement
from quorum_attention.planner.machine import Machine
from quorum_attention.planner.search import Candidate, Request, choose

# Predictions for tasks as small as these have been a quarter off.
_CLEARLY = 0.8
# What takes less (seconds) is not worth building another kernel for.
_WORTH_SECONDS = 0.02


def quickest(
    work: Workload,
    request: Request,
    preferred: InnerKernel,
    others: Iterable[InnerKernel],
    place: Placement,
    machine: Machine,
    *,
    backward: bool,
    believed: Callable[[InnerKernel], bool],
) -> InnerKernel:
    """``preferred``, or of ``others`` one that is predicted clearly faster or alone fits.

    Args:
        others: kernels that take the call.
        believed: asked last, because it may mean building the kernel: whether it is right here.

    Raises:
        BudgetError: none fits; names the smallest budget that would do.
    """
    failure: BudgetError | None = None
    best: tuple[float, InnerKernel] | None = None
    try:
        found = choose(work, request, preferred, place, machine, backward=backward)
        if _taken_at_once(found):
            return preferred
        best = found.cost.seconds, preferred
    except BudgetError as error:
        failure = error
    for kernel in others:
        try:
            seconds = choose(work, request, kernel, place, machine, backward=backward).cost.seconds
        except BudgetError as error:
            # The number it names has to work when it is given.
            if best is None and believed(kernel):
                failure = _lesser(failure, error)
            continue
        faster = best is None or seconds < best[0] * (_CLEARLY if best[1] is preferred else 1.0)
        if faster and believed(kernel):
            best = seconds, kernel
    if best is not None:
        return best[1]
    assert failure is not None, "the preferred kernel either fits or does not"
    raise failure


def _lesser(one: BudgetError | None, other: BudgetError) -> BudgetError:
    """Of two refusals the one that names the smaller budget."""
    sizes = [math.inf if e is None or e.smallest_bytes is None else e.smallest_bytes
             for e in (one, other)]  # fmt: skip
    return other if one is None or sizes[1] < sizes[0] else one


def _taken_at_once(found: Candidate) -> bool:
    return found.direct or found.cost.seconds < _WORTH_SECONDS
