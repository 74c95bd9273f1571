"""Runs a pass through slots, as its machine says (control/machine.py).

Only the arena and an inner kernel's workspace can run out of memory. Both failures are caught here;
the machine decides what to do, and this file does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.control.events import Headroom, OutOfMemory, UnitDone
from quorum_attention.execution.control.instructions import GiveUp
from quorum_attention.execution.control.machine import HERE, Machine
from quorum_attention.execution.control.visits import Visit
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.clock import NoClock
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import PageLocks
from quorum_attention.execution.engine import Engine, SlotPass, Unit
from quorum_attention.execution.job import Job
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.workload import Group

MakePass = Callable[[Schedule, Tools], SlotPass]


def run(job: Job, machine: Machine, make_pass: MakePass, locks: PageLocks, tools: Tools) -> None:
    """Run the units that the machine has left.

    Args:
        make_pass: makes the pass for a schedule, because the slots depend on the task size.
        locks: page locks of the tensors in host memory that are copied from or to.

    Raises:
        OutOfMemoryError: the machine gives up. Results so far are lost, nothing stays allocated.
    """
    report = job.report
    assert report is not None, "a pass through slots has a plan, and so a report"
    backend = backend_of(job.call.device)
    one = _Run(job, report, make_pass, machine, tools, locks, backend)
    one.total = machine.units_left
    while not machine.finished:
        failure = one.attempt()
        if not machine.finished:
            one.recover(failure)
    schedule = one.schedule
    report.levels = schedule.decomposition.levels
    report.left_out = schedule.left_out
    report.n_cap = schedule.n_cap


@dataclass(slots=True)
class _Run:
    """A pass on one device, and the machine that directs it.

    Attributes:
        last_done: when the last unit was done, or this attempt began.
        counted, total: units done and units in all, as progress is reported.
    """

    job: Job
    report: PassReport
    make_pass: MakePass
    machine: Machine
    tools: Tools
    locks: PageLocks
    backend: Backend
    last_done: float = 0.0
    counted: int = 0
    total: int = 0

    @property
    def schedule(self) -> Schedule:
        """The schedule with the machine's present depth and slots."""
        here = self.machine.devices[HERE]
        return self.machine.queue.cuts.schedule(here.depth).changed(n_cap=here.n_cap)

    def attempt(self) -> str | None:
        """Run until all units are done, headroom is found, or memory runs out.

        Returns:
            the allocator's message if memory ran out, else None.
        """
        self.last_done = time.perf_counter()
        n_slots = self.machine.start(HERE)
        room = self._room_for_coarser()
        try:
            self._through_slots(self.make_pass(self.schedule, self.tools), n_slots, room)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Only the text leaves: the traceback would hold the failed attempt's tensors.
            return first_line(error)
        return None

    def _through_slots(self, pass_: SlotPass, n_slots: int, room: Callable[[], bool]) -> None:
        device, clock = self.job.call.device, self.tools.clock
        mover: Mover | None = None
        try:
            arena = self.backend.allocate(n_slots * pass_.layout.slot_bytes, device)
            mover = self.backend.mover(device, n_slots, self.locks, clock)
            engine = Engine(pass_, arena, n_slots, mover, clock)
            engine.run(self._turns(room), self._done)
        finally:
            if mover is not None:
                # Also after a failure: no copy may be in flight when the arena is freed, and the
                # results of units that were reported done must have arrived.
                mover.finish(wait=True)
                self.report.loaded_bytes += mover.loaded_bytes
                self.report.stored_bytes += mover.stored_bytes

    def _turns(self, room: Callable[[], bool]) -> Iterator[tuple[Group, Visit]]:
        """The machine's units. Ends early, between two groups, if there is headroom."""
        while not (self.machine.between_groups(HERE) and room()):
            launch = self.machine.next(HERE)
            if launch is None:
                return
            yield launch.group, launch.visit

    def _done(self, unit: Unit) -> None:
        self.machine.on(UnitDone(HERE, unit.group, unit.visit.task.path))
        self.last_done = time.perf_counter()
        self.report.units += 1
        self.counted += 1
        self.job.tell(self.counted, self.total)

    def _room_for_coarser(self) -> Callable[[], bool]:
        """A function that says whether there is headroom: whether the slots of one level less fit
        twice into free memory."""
        if not self.machine.may_coarsen(HERE):
            return lambda: False
        here = self.machine.devices[HERE]
        coarser = self.make_pass(self.machine.queue.cuts.schedule(here.depth - 1), Tools(NoClock()))
        needed = 2 * here.n_cap * coarser.layout.slot_bytes
        return lambda: self.backend.free_bytes(self.job.call.device) >= needed

    def recover(self, failure: str | None) -> None:
        """Tell the machine that an attempt failed, or found headroom (``failure`` is None).

        Raises:
            OutOfMemoryError: the machine gives up.
        """
        if failure is None:
            order = self.machine.on(Headroom(HERE))
        else:
            self.backend.give_back_cached()
            order = self.machine.on(OutOfMemory(HERE))
        if isinstance(order, GiveUp):
            before = "".join(f"\n  before that: {line}" for line in self.machine.history)
            raise OutOfMemoryError(
                f"out of memory in {order.where} and no recovery: {order.reason}. The allocator "
                f"said: {failure}{before}"
            )
        self.report.recoveries.append(self.machine.history[-1])
        if failure is not None:
            self.report.recovery_seconds += time.perf_counter() - self.last_done
        self.counted = self.report.units
        self.total = self.counted + self.machine.units_left
