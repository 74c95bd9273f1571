"""Runs units through the slots: load, compute, store, overlapped with the units before and after.

What a unit computes is up to the pass (routes/slots.py), how bytes are copied is up to the mover
(device/mover.py). Only the arena and an inner kernel's workspace can run out of memory. Both
failures are caught in ``run``; the machine (control/machine.py) says what to do about them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.control.events import GiveUp, Headroom, OutOfMemory, UnitDone
from quorum_attention.execution.control.machine import HERE, Machine
from quorum_attention.execution.control.visits import Visit
from quorum_attention.execution.device.clock import Clock, NoClock
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import PageLocks
from quorum_attention.execution.job import Job, Tools
from quorum_attention.execution.memory import first_line, is_out_of_memory
from quorum_attention.execution.report import PassReport
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.slot_rows import SlotLayout, SlotRows, Unit, arena_and_mover
from quorum_attention.execution.workload import Group


@dataclass(frozen=True, slots=True)
class SlotPass:
    """A pass as the engine runs it: what is moved and how a unit is computed.

    Attributes:
        layout: of the slots.
        rows: makes what moves rows, in so many slots of an arena.
        compute: computes a loaded unit.
        prepare: changes a unit's freshly loaded inputs before ``compute``.
        spoiled: says of a computed unit whether its results are unusable. None: they never are, and
            the host never waits to ask.
        repeats: given a spoiled unit whose inputs are in the slot unchanged, says whether to run it
            again from the state before it. False leaves its results as they are.
    """

    layout: SlotLayout
    rows: Callable[[dict[int, torch.Tensor], Mover], SlotRows]
    compute: Callable[[Unit], None]
    prepare: Callable[[Unit], None] | None = None
    spoiled: Callable[[Unit], bool] | None = None
    repeats: Callable[[Unit], bool] | None = None


class StoringError(RuntimeError):
    """Results of a unit are stored in part: to compute it again would add that part twice. So it is
    not recovered from, as running out of memory is elsewhere."""


class Engine:
    """Runs units in order in ``n_cap`` slots that are carved from one arena (uint8)."""

    def __init__(
        self, pass_: SlotPass, arena: torch.Tensor, n_cap: int, mover: Mover, clock: Clock
    ) -> None:
        self.pass_ = pass_
        self.mover = mover
        self.clock = clock
        self.n_slots = n_cap
        self.rows = pass_.rows(pass_.layout.slots(arena, n_cap), mover)
        self._stored_last: Group | None = None

    def run(self, turns: Iterable[tuple[Group, Visit]], done: Callable[[Unit], None]) -> None:
        """Run ``turns`` in order; ``done`` is called once the copies of a unit's results are
        issued."""
        overlapped = self.n_slots > 1
        # A unit is settled one unit late if the host has to look at its flags, so that the device
        # computes the next one meanwhile.
        lag = 1 if overlapped and self.pass_.spoiled is not None else 0
        ahead = max(1, self.n_slots - 1)
        waiting: deque[Unit] = deque()
        computed: deque[Unit] = deque()
        source = self._units(turns)

        def fetch(count: int) -> None:
            while len(waiting) < count:
                unit = next(source, None)
                if unit is None:
                    break
                self.rows.load_inputs(unit)
                waiting.append(unit)
            if waiting:
                self._load_state(waiting[0])

        try:
            fetch(1)
            while waiting:
                unit = waiting.popleft()
                self._compute(unit)
                computed.append(unit)
                while len(computed) > lag:
                    self._settle(computed, done)
                fetch(ahead)
            while computed:
                self._settle(computed, done)
        except Exception as error:
            if is_out_of_memory(error):
                # Units that were computed before the failure stay done.
                while computed:
                    self._settle(computed, done)
            raise

    def _settle(self, computed: deque[Unit], done: Callable[[Unit], None]) -> None:
        """Store the first unit of ``computed``; if it is spoiled, repeat it first."""
        spoiled = self.pass_.spoiled
        if spoiled is not None:
            self.mover.wait_computed(computed[0].slot)
            if spoiled(computed[0]):
                # If this fails, none of them counts as computed.
                first, *followers = computed
                computed.clear()
                if self._repeat(first):
                    for follower in followers:
                        self._run_again(follower)
                computed.extend((first, *followers))
        unit = computed.popleft()
        try:
            self.rows.store(unit)
        except Exception as error:
            if is_out_of_memory(error):
                raise StoringError(
                    "memory ran out while a unit's results were copied out of its slot, so it is "
                    f"not known which of them arrived: {error}"
                ) from error
            raise
        done(unit)
        # Units come group by group.
        if self._stored_last is not None and unit.group != self._stored_last:
            self.rows.leave(self._stored_last)
        self._stored_last = unit.group

    def _repeat(self, unit: Unit) -> bool:
        """Run a spoiled unit again for as long as that helps; returns whether it was run again."""
        assert self.pass_.spoiled is not None
        assert self.pass_.repeats is not None
        whole, changed = unit.from_home(), False
        while self.pass_.spoiled(unit):
            # Finished rows may have overwritten the inputs.
            self.mover.finish(wait=True)
            self.rows.load_inputs(whole)
            self.mover.finish(wait=True)
            self.rows.fill_up(whole)
            if not self.pass_.repeats(whole):
                with self.mover.compute_stage(unit.slot):
                    self.rows.finish(unit, over_inputs=True)
                self.mover.wait_computed(unit.slot)
                break
            self._load_state(whole)
            self._compute(whole)
            self.mover.wait_computed(unit.slot)
            changed = True
        return changed

    def _run_again(self, unit: Unit) -> None:
        self.mover.finish(wait=True)
        self.rows.load_inputs(unit)
        self._load_state(unit)
        self._compute(unit)
        self.mover.wait_computed(unit.slot)

    def _units(self, turns: Iterable[tuple[Group, Visit]]) -> Iterator[Unit]:
        previous: Unit | None = None
        for index, (group, visit) in enumerate(turns):
            slot = index % self.n_slots
            before = None
            if previous is not None and previous.group == group and visit.carried:
                before = (previous.slot, previous.fields)
            unit = Unit(group, visit, slot, self.rows.fields(slot, group, visit), before)
            yield unit
            previous = unit

    def _load_state(self, unit: Unit) -> None:
        # With two slots or more, rows of the unit just before are carried, not loaded. All other
        # rows were last stored by the unit before that one, or earlier.
        after = (unit.slot - min(2, self.n_slots)) % self.n_slots
        self.rows.load_states(unit, after)

    def _compute(self, unit: Unit) -> None:
        with self.mover.compute_stage(unit.slot):
            with self.clock.timed("gather"):
                self.rows.fill(unit)
                self.rows.carry(unit)
                self.rows.fill_up(unit)
                if self.pass_.prepare is not None:
                    self.pass_.prepare(unit)
            with self.clock.timed("compute"):
                self.pass_.compute(unit)
            with self.clock.timed("scatter"):
                self.rows.finish(unit)


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
    one = _Run(job, report, make_pass, machine, tools, locks)
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
        clock, n_bytes = self.tools.clock, n_slots * pass_.layout.slot_bytes
        with arena_and_mover(self.job, n_bytes, n_slots, self.locks, clock) as (arena, mover):
            engine = Engine(pass_, arena, n_slots, mover, clock)
            engine.run(self._turns(room), self._done)

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
        device = self.job.call.device
        return lambda: backend_of(device).free_bytes(device) >= needed

    def recover(self, failure: str | None) -> None:
        """Tell the machine that an attempt failed, or found headroom (``failure`` is None).

        Raises:
            OutOfMemoryError: the machine gives up.
        """
        if failure is None:
            order = self.machine.on(Headroom(HERE))
        else:
            backend_of(self.job.call.device).give_back_cached()
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
