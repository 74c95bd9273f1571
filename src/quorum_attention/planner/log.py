"""A line in the log ("quorum_attention", INFO) when a call is cut, once for each kind of call."""

from __future__ import annotations

import logging
from threading import Lock

from quorum_attention.planner.plan import Plan
from quorum_attention.planner.small import rounded
from quorum_attention.sizes import format_bytes, format_seconds

LOG = logging.getLogger("quorum_attention")
_MOST_KINDS = 4096
_told: set[tuple[object, ...]] = set()
_lock = Lock()


def is_cut(plan: Plan) -> bool:
    """Whether a pass runs in more than one unit: head group after head group, or as tasks."""
    return bool(plan.levels) or plan.n_groups > 1


def tell_of_cut(plan: Plan) -> None:
    """Log that a pass is cut, unless one of its kind has been: lengths of the same power of two,
    everything else equal."""
    if not LOG.isEnabledFor(logging.INFO) or not is_cut(plan):
        return
    schedule = plan.schedule
    kind = (
        rounded(plan.work), plan.backward, plan.budget_bytes, plan.kernel, plan.levels,
        schedule.group, type(schedule.route),
    )  # fmt: skip
    with _lock:
        if kind in _told:
            return
        if len(_told) >= _MOST_KINDS:
            _told.clear()
        _told.add(kind)
    work = plan.work
    within = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    LOG.info(
        "%s of %s queries x %s keys, %d x %d heads, is cut: budget %s, depth %d (%s tasks), %d "
        "head group(s), kernel %s, peak %s, predicted %s; said once for calls like this",
        "backward" if plan.backward else "forward", f"{work.n_queries:,}", f"{work.n_keys:,}",
        work.batch, work.heads, within, plan.depth, f"{plan.n_tasks:,}", plan.n_groups, plan.kernel,
        format_bytes(plan.peak_bytes), format_seconds(plan.predicted_seconds),
    )  # fmt: skip
