"""Runs a pass through slots: what its machine says (control/machine.py) is done here.

The only places that can run out of memory are the arena and an inner kernel's workspace. Either
failure lands here; the machine decides, this file obeys.
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
from quorum_attention.execution.engine import Engine, Pass, Unit
from quorum_attention.execution.job import Job
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.workload import Group

MakePass = Callable[[Schedule, Tools], Pass]


def run(job: Job, machine: Machine, make_pass: MakePass, locks: PageLocks, tools: Tools) -> None:
    """Run what the machine has left of a pass, as it says.

    Args:
        make_pass: builds the pass for a schedule (its slots depend on the task size).
        locks: of the tensors in host memory that are copied from or to.

    Raises:
        OutOfMemoryError: the machine gives up; completed work is lost with the call, nothing stays
            allocated.
    """
    report = job.report
    assert report is not None, "what goes through slots has been planned"
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
    """A pass on the one device, and the machine that is told of it and obeyed.

    Attributes:
        last_done: when the last unit was done, or the attempt began.
        counted, total: units as progress is told of them.
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
        """As the machine has it now."""
        here = self.machine.devices[HERE]
        return self.machine.queue.cuts.schedule(here.depth).changed(n_cap=here.n_cap)

    def attempt(self) -> str | None:
        """Run until everything is done, headroom is found (None), or memory runs out: what the
        allocator said."""
        self.last_done = time.perf_counter()
        n_slots = self.machine.start(HERE)
        room = self._room_for_coarser()
        try:
            self._through_slots(self.make_pass(self.schedule, self.tools), n_slots, room)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Only the text is kept: the traceback holds the failed attempt's tensors.
            return first_line(error)
        return None

    def _through_slots(self, work: Pass, n_slots: int, room: Callable[[], bool]) -> None:
        device, clock = self.job.call.device, self.tools.clock
        mover: Mover | None = None
        try:
            arena = self.backend.allocate(n_slots * work.layout.slot_bytes, device)
            mover = self.backend.mover(device, n_slots, self.locks, clock)
            engine = Engine(work, arena, n_slots, mover, clock)
            engine.run(self._turns(room), self._done)
        finally:
            if mover is not None:
                # Also after a failure: nothing may be in flight when the arena is let go, and
                # whatever was reported done has to have arrived.
                mover.finish(wait=True)
                self.report.loaded_bytes += mover.loaded_bytes
                self.report.stored_bytes += mover.stored_bytes

    def _turns(self, room: Callable[[], bool]) -> Iterator[tuple[Group, Visit]]:
        """The machine's units; they end early before a group that there is room to cut less."""
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
        """Whether memory has become free enough to undo a deepening."""
        if not self.machine.may_coarsen(HERE):
            return lambda: False
        here = self.machine.devices[HERE]
        coarser = self.make_pass(self.machine.queue.cuts.schedule(here.depth - 1), Tools(NoClock()))
        needed = 2 * here.n_cap * coarser.layout.slot_bytes
        return lambda: self.backend.free_bytes(self.job.call.device) >= needed

    def recover(self, failure: str | None) -> None:
        """Tell the machine of a failed attempt, or of headroom (None), and obey.

        Raises:
            OutOfMemoryError: it gives up.
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
