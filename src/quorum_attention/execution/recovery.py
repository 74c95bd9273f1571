"""A pass on the inputs as they lie, head group by head group, and what memory left of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from quorum_attention.execution.call import Call
from quorum_attention.execution.clock import Clock
from quorum_attention.execution.memory import first_line, give_back_cached, is_out_of_memory
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.schedule import Schedule, through_slots
from quorum_attention.execution.workload import Group, groups


@dataclass(frozen=True, slots=True)
class AsTheyLie:
    """A pass without slots.

    Attributes:
        groups: the head groups it computes, in order.
        run: computes one after the other into the results, and yields after each.
        units: of each group, for the report.
        clock: what measures it; None: each group is one call of the kernel (execution/direct.py),
            not a sweep, and nothing is measured.
    """

    groups: Sequence[Group]
    run: Iterator[None]
    units: int
    clock: Clock | None = None


def run_pass(
    call: Call,
    schedule: Schedule,
    report: PassReport,
    lying: AsTheyLie | None,
    slots: Callable[[Schedule, list[Group]], None],
) -> None:
    """Run ``lying``, where there is one, and through ``slots`` whatever is left to do.

    Groups that are done stay done: their results are where they belong.

    Raises:
        OutOfMemoryError, and torch's own: the schedule is pinned, or nothing is left to try.
    """
    if lying is None:
        if schedule.sweep:
            schedule = through_slots(schedule, call.work)
        slots(schedule, list(groups(call.work, schedule.group)))
        return
    left = list(lying.groups)
    began = time.perf_counter()
    failure = None
    try:
        for _ in lying.run:
            left.pop(0)
            report.units += lying.units
            began = time.perf_counter()
    except Exception as error:
        if schedule.pinned or not is_out_of_memory(error):
            raise
        # Only the text is kept: the traceback holds the failed attempt's tensors.
        failure = first_line(error)
    if lying.clock is not None:
        report.stages = lying.clock.seconds()
    if failure is None:
        return
    # Its frame is gone, and what it held.
    give_back_cached(call.device)
    report.recovery_seconds += time.perf_counter() - began
    how = "inputs in place: out of memory"
    if lying.clock is None:
        how = "monolithic call out of memory"
        schedule = replace(schedule.deeper(call.work), n_cap=1)
        what = "depth 0 -> 1"
    else:
        schedule, what = through_slots(schedule, call.work), "through slots"
    done = len(lying.groups) - len(left)
    kept = f", {done} of {len(lying.groups)} head groups done" if done else ""
    report.recoveries.append(f"{how} ({failure}{kept}): {what}")
    slots(schedule, left)
