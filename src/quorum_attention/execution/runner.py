"""Runs a pass to its end: arena, units, and the guardrail's instructions.

The only places that can run out of memory are the arena and an inner kernel's workspace. Either
failure lands here; the guardrail decides, this file obeys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.call import Call
from quorum_attention.execution.control.visits import Visit, touched_rows, visits
from quorum_attention.execution.cutting import Cutting
from quorum_attention.execution.device.clock import Clock, NoClock
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import PageLocks
from quorum_attention.execution.engine import Engine, Pass, Unit
from quorum_attention.execution.guardrail import Coarsen, Deepen, Event, GiveUp, Guardrail
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.schedule import DEEPEN_BY, Schedule
from quorum_attention.execution.tools import Progress, Tools, make_tools
from quorum_attention.execution.workload import Group

MakePass = Callable[[Schedule, Tools], Pass]


@dataclass(slots=True)
class _Queue:
    """What is left: the groups, and within the first of them the tasks; the groups after it run the
    tasks ``every``."""

    groups: list[Group]
    tasks: list[Task]
    every: list[Task]
    completed: list[Task]
    last_done: float = 0.0

    @property
    def units(self) -> int:
        """Tasks of all groups together."""
        return len(self.tasks) + max(0, len(self.groups) - 1) * len(self.every)

    def turns(self, carry: bool, stop: Callable[[], bool]) -> Iterator[tuple[Group, Visit]]:
        """Every remaining unit in order.

        Ends early before a group where ``stop`` says so.
        """
        rows = touched_rows(self.completed)
        for visit in visits(list(self.tasks), touched=rows, carry=carry):
            yield self.groups[0], visit
        if len(self.groups) > 1:
            planned = list(visits(self.every, carry=carry))
            for group in self.groups[1:]:
                if stop():
                    return
                for visit in planned:
                    yield group, visit


def run(
    make_pass: MakePass,
    schedule: Schedule,
    left: list[Group],
    call: Call,
    host_tensors: list[torch.Tensor],
    report: PassReport,
    progress: Progress | None = None,
    *,
    backward: bool,
) -> None:
    """Run a pass under ``schedule``, recovering from out-of-memory failures unless pinned.

    Args:
        make_pass: builds the pass for a schedule (its slots depend on the task size).
        left: the head groups to run, none larger than the schedule's.
        host_tensors: tensors copied from or to; pageable ones are page-locked meanwhile.

    Raises:
        OutOfMemoryError: nothing finer is left, or the schedule is pinned; completed work is
            lost with the call, nothing stays allocated.
    """
    work, device = call.work, call.device
    cutting = Cutting(work, call.kernel, backward=backward)
    shape = schedule.decomposition
    guard = Guardrail(
        n_cap=schedule.n_cap,
        depth=shape.depth,
        floor_depth=shape.depth,
        max_depth=_deepest(shape),
        pinned=schedule.pinned,
        deepened_n_cap=1,
    )
    every, schedule = cutting.tasks(schedule)
    queue = _Queue(list(left), list(every), every, [])
    total = queue.units
    counted = 0
    label = "backward" if backward else "forward"
    tools = make_tools(device, schedule, timed=report.timed)
    with backend_of(device).page_locks(host_tensors) as locks:
        while queue.groups:
            queue.last_done = time.perf_counter()
            failure: tuple[str, str] | None = None
            coarser = cutting.tasks(schedule.coarser(work))[1] if guard.may_coarsen else None
            room = _RoomForCoarser(coarser, make_pass, device)
            try:
                counted = _attempt(
                    make_pass(schedule, tools), schedule, queue, device, locks,
                    report, progress, (counted, total, label), room, tools.clock,
                )  # fmt: skip
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Only the text is kept: the traceback holds the failed attempt's tensors.
                failure = (first_line(error), _place(queue))
            if failure is not None:
                backend_of(device).give_back_cached()
                text, where = failure
                guard, order = guard.on(Event.OUT_OF_MEMORY, where=where)
                if isinstance(order, GiveUp):
                    raise OutOfMemoryError(
                        f"out of memory in {where} and no recovery: {order.reason}. "
                        f"The allocator said: {text}" + _told(guard)
                    )
            elif queue.groups:
                guard, order = guard.on(Event.HEADROOM)
            else:
                break
            report.recoveries.append(guard.history[-1])
            if failure is not None:
                report.recovery_seconds += time.perf_counter() - queue.last_done
            schedule = replace(schedule, n_cap=guard.n_cap)
            if isinstance(order, Deepen):
                queue.every, schedule = cutting.tasks(schedule.deeper(work))
                queue.tasks, schedule = cutting.further(queue.tasks, schedule)
            elif isinstance(order, Coarsen):
                queue.every, schedule = cutting.tasks(schedule.coarser(work))
                queue.tasks = list(queue.every)
            counted = report.units
            total = counted + queue.units
    # Of what went before on the inputs as they lie, too.
    for stage, seconds in tools.clock.seconds().items():
        report.stages[stage] = report.stages.get(stage, 0.0) + seconds
    report.levels = schedule.decomposition.levels
    report.left_out = 0.0 if schedule.trimmed is None else schedule.trimmed.left_out
    report.n_cap = schedule.n_cap


def _attempt(
    job: Pass,
    schedule: Schedule,
    queue: _Queue,
    device: torch.device,
    locks: PageLocks,
    report: PassReport,
    progress: Progress | None,
    count: tuple[int, int, str],
    room: _RoomForCoarser,
    clock: Clock,
) -> int:
    """Run until everything is done or something fails; the queue keeps what is left."""
    counted, total, label = count
    n_slots = min(schedule.n_cap, max(1, len(queue.tasks) * len(queue.groups)))
    backend = backend_of(device)
    mover: Mover | None = None
    try:
        arena = backend.allocate(n_slots * job.layout.slot_bytes, device)
        mover = backend.mover(device, n_slots, locks, clock)
        engine = Engine(job, arena, n_slots, mover, clock)

        def done(unit: Unit) -> None:
            nonlocal counted
            if unit.group != queue.groups[0]:
                queue.groups.pop(0)
                queue.completed.clear()
                queue.tasks[:] = queue.every
            queue.tasks.pop(0)
            queue.completed.append(unit.visit.task)
            queue.last_done = time.perf_counter()
            report.units += 1
            counted += 1
            if progress is not None:
                progress(counted, total, label)

        engine.run(queue.turns(n_slots > 1, room), done)
        # Either that was all, or the turns ended early, after a whole group.
        queue.groups.pop(0)
        queue.completed.clear()
        queue.tasks[:] = queue.every if queue.groups else []
    finally:
        if mover is not None:
            # Also after a failure: nothing may be in flight when the arena is let go, and
            # whatever was reported done has to have arrived.
            mover.finish(wait=True)
            report.loaded_bytes += mover.loaded_bytes
            report.stored_bytes += mover.stored_bytes
    return counted


def _place(queue: _Queue) -> str:
    path = queue.tasks[0].path if queue.tasks else ()
    return f"task {path or '()'} ({len(queue.groups)} head group(s) to go)"


def _told(guard: Guardrail) -> str:
    return "".join(f"\n  before that: {line}" for line in guard.history)


def _deepest(shape: Decomposition) -> int:
    """Levels until a task is down to about a tile: beyond that nothing gets smaller."""
    smallest = shape.tile if shape.layout == "aligned" else 1
    deeper = shape
    while deeper.max_task_tokens > 2 * smallest and deeper.depth < shape.depth + 8:
        finer = deeper.deeper(DEEPEN_BY)
        if finer.max_task_tokens >= deeper.max_task_tokens:
            break
        deeper = finer
    return deeper.depth


class _RoomForCoarser:
    """Whether memory has become free enough to undo a deepening."""

    def __init__(self, coarser: Schedule | None, make_pass: MakePass, device: torch.device) -> None:
        self.device = device
        self.needed: int | None = None
        if coarser is not None:
            slot_bytes = make_pass(coarser, Tools(NoClock())).layout.slot_bytes
            self.needed = 2 * coarser.n_cap * slot_bytes

    def __call__(self) -> bool:
        if self.needed is None:
            return False
        return backend_of(self.device).free_bytes(self.device) >= self.needed
