"""Routes through slots carved from one arena, on any device, wherever inputs and results are.

``Slots``: each task is copied into a slot, computed, and copied out. It runs every call.

``Streaming``: a chunk of rows stays on the device, and the other side streams by it. In a forward
queries stay, and keys and values stream by: the statistics of a chunk never leave the device. In a
backward keys and values stay with their gradients, and queries stream by with theirs, which wait in
host memory between chunks. Where memory is tight that moves far fewer bytes than tasks through
slots, in fewer and longer copies, and the kernel gets larger rectangles (docs/planner.md). If
memory runs out, what is left goes through slots, by the decomposition that the schedule has for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any

from quorum_attention.decomposition import Decomposition, Rectangle, Rows
from quorum_attention.decomposition.decomposition import Span, Task
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.pieces import Passage
from quorum_attention.decomposition.rectangles import Batch
from quorum_attention.execution.call import Job, Tools
from quorum_attention.execution.control.controller import Group, RecoveryController
from quorum_attention.execution.control.visits import Visit
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.residency import home_device
from quorum_attention.execution.engine import (
    Beside,
    Engine,
    SlotLayout,
    SlotRows,
    Unit,
    moved_tensors,
    open_slots,
    slot_layout,
)
from quorum_attention.execution.problem import (
    Axis,
    Footprint,
    Problem,
    Tensors,
    WorkCounts,
    count_groups,
    home_bytes,
    moved_bytes,
    result_bytes,
)
from quorum_attention.execution.scaling import SMALL_BYTES, BackwardScaling, what_is_read
from quorum_attention.execution.schedule import Attempt, Route, Schedule
from quorum_attention.kernels.protocol import CallShape
from quorum_attention.quorums import quorum_size
from quorum_attention.sizes import counted

# --- Tasks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slots(Route):
    """One task after the other, through slots carved from one arena."""

    whole_groups = False

    @property
    def words(self) -> str:
        """A description of the route for people."""
        return f"through slots, accumulators: {self.accumulator}"

    def task_rows(self, shape: Decomposition, work: CallShape) -> tuple[int, int]:
        """Rows of the largest task."""
        tokens = shape.max_task_tokens if self.trimmed is None else self.trimmed.largest
        return min(tokens, work.n_queries), min(tokens, work.n_keys)

    def limits(self, shape: Decomposition, work: CallShape) -> tuple[int, int]:
        """A monolithic task is one rectangle. Any other task is halved at chunks, so that no side
        of a rectangle has more than half its chunks, rounded up."""
        if shape.depth == 0:
            return work.n_queries, work.n_keys
        # Half of an odd number of chunks is rounded up.
        chunks = quorum_size(shape.levels[-1])
        half = -(-shape.max_task_tokens * -(-chunks // 2) // chunks)
        unit = shape.tile if shape.layout == "aligned" else 1
        half = -(-half // unit) * unit
        queries, keys = self.task_rows(shape, work)
        return min(half, queries), min(half, keys)

    def runs(self, schedule: Schedule, problem: Problem) -> bool:
        """Always true."""
        return True

    def memory_use(self, schedule: Schedule, problem: Problem) -> Footprint:
        """The arena, workspace, results, and the accumulators if the budget counts them."""
        work, group = problem.work, schedule.group
        homes = home_bytes(problem, group, self.accumulator)
        # What a scaled backward has for each key/value head of a slot (execution/scaling.py).
        scaling = (4 * group.batch * group.kv_heads,) * (2 * self.n_cap if problem.scaled else 0)
        return Footprint(
            problem.work.device_type,
            self.streams * problem.workspace(schedule.extent(work)),
            self.n_cap * layout_of(schedule, problem).slot_bytes,
            (*homes, *scaling),
            (problem.place.divided or 0, *result_bytes(problem)),
        )

    def work_counts(self, schedule: Schedule, problem: Problem) -> WorkCounts:
        """Inputs are copied in at every visit of a row, states in and out."""
        units = count_groups(problem.work, schedule.group) * schedule.n_tasks
        inputs, states = moved_bytes(problem)
        visits = schedule.visits(problem.work)
        up, down = visits * inputs, float(states)
        if self.accumulator == "host":
            # Trimmed tasks may leave out rows altogether, so there may be less than one visit.
            up += max(0.0, visits - 1.0) * states
            down = visits * states
        return WorkCounts(
            units=units,
            up=up,
            down=down,
            resident=problem.place.resident,
            hidden_by=max(1, units) if self.n_cap > 1 else 1,
            in_slots=True,
            run_copies=len(problem.spec.inputs) + 2 * len(problem.spec.states),
            even=schedule.decomposition.depth < 2,
        )

    def slots(self, **changes: Any) -> Slots:
        """The same route with other values of some fields."""
        return replace(self, **changes) if changes else self

    @contextmanager
    def opened(self, job: Job, schedule: Schedule) -> Iterator[Attempt]:
        """The states that wait outside of slots last for all attempts of a pass."""
        home = home_device(self.accumulator, job.device)

        def attempt(
            schedule: Schedule, controller: RecoveryController, tools: Tools
        ) -> Iterator[int]:
            scaling, n_slots, group = None, controller.n_slots, schedule.group
            if job.problem.scaled:
                heads = group.batch, group.kv_heads
                scaling = BackwardScaling(job.work, job.device, heads, n_slots, by_unit=True)
            done, total = controller.units_done, controller.units_done + controller.units_left
            slots = layout_of(schedule, job.problem), n_slots
            with open_slots(job, moved, tools.clock, slots) as (rows,):
                engine = Engine(job, tools, schedule.limits, rows, scaling)
                for unit in engine.run(_units(job, rows, controller)):
                    controller.done(unit.group, unit.visit.task.path)
                    done += 1
                    job.tell(done, total)
                    yield 1

        with moved_tensors(job, schedule.group, home, made_at=home) as moved:
            yield attempt


def layout_of(schedule: Schedule, problem: Problem, axis: Axis | None = None) -> SlotLayout:
    """The memory of a task, or of its rows of one side."""
    work, dtype = problem.work, problem.place.result_dtype
    rows = schedule.task_rows(work)
    return slot_layout(problem.spec, work, schedule.group, rows, dtype, axis=axis)


def _has_headroom(job: Job, controller: RecoveryController) -> bool:
    """Whether the slots of one level less fit twice into free memory."""
    coarser = layout_of(controller.cuts.schedule(controller.depth - 1), job.problem)
    free = backend_of(job.device).free_bytes(job.device)
    return free >= 2 * controller.n_cap * coarser.slot_bytes


def _units(job: Job, rows: SlotRows, controller: RecoveryController) -> Iterator[Unit]:
    """The controller's units, in slots in turn. Ends early, between two groups, if there is
    headroom."""
    n_slots, previous = len(rows.slots), None
    for number in count():
        if controller.between_groups and controller.may_coarsen and _has_headroom(job, controller):
            return
        if (unit := controller.next()) is None:
            return
        (group, visit), slot = unit, number % n_slots
        before = None
        if previous is not None and previous.group == group and visit.carried:
            before = (previous.slot, previous.fields)
        # With two slots or more, rows of the unit just before are carried, not loaded. All other
        # rows were last stored by the unit before that one, or earlier.
        after = (slot - min(2, n_slots)) % n_slots
        previous = Unit(group, visit, slot, rows.fields(slot, group, visit), after, before)
        yield previous


# --- Streaming ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Streaming(Route):
    """A chunk of queries (forward) or of keys (backward) stays; blocks of the others stream by.

    Attributes:
        stays: the side whose chunks stay: of queries, or of keys.
        queries, keys: rows of a chunk, and of a block.
        instead: the route through slots that takes over.
        n_cap: blocks resident at once.
    """

    n_cap: int = 2
    stays: Axis = "query"
    queries: int = 1
    keys: int = 1
    instead: Slots = field(default_factory=Slots)

    recovery = "streaming: failed", "through slots"

    @property
    def accumulators(self) -> str:
        """Where states wait; in a forward none does."""
        return "none" if self.stays == "query" else "host"

    @property
    def words(self) -> str:
        """A description of the route for people."""
        sides = [f"{self.queries:,} queries", f"{self.keys:,} keys"]
        chunk, block = sides if self.stays == "query" else sides[::-1]
        return f"{chunk} stay, {block} at a time stream by (tasks only if that fails)"

    def parts(self, schedule: Schedule, work: CallShape) -> str:
        """How often a block streams by."""
        return f"{counted(self.passage(work).n_units, 'time')} a block and a chunk"

    @property
    def streams_by(self) -> Axis:
        """The other side."""
        return "key" if self.stays == "query" else "query"

    def rows(self, axis: Axis) -> int:
        """Rows of a chunk or block of this side."""
        return self.queries if axis == "query" else self.keys

    def task_rows(self, shape: Decomposition, work: CallShape) -> tuple[int, int]:
        """A chunk and a block."""
        return min(self.queries, work.n_queries), min(self.keys, work.n_keys)

    def limits(self, shape: Decomposition, work: CallShape) -> tuple[int, int]:
        """A chunk and a block are one rectangle."""
        return self.task_rows(shape, work)

    def runs(self, schedule: Schedule, problem: Problem) -> bool:
        """Whether the kernel takes rectangles one by one, wherever they are, and nothing else
        depends on where they are."""
        work, kernel = problem.work, problem.kernel
        anywhere = kernel.operator and kernel.several_streams and not kernel.own_attention
        plain = work.mask is None and not work.dropout and not kernel.sparse
        sides = self.stays == ("key" if problem.spec.backward else "query")
        return anywhere and plain and sides and min(work.n_queries, work.n_keys) > 0

    def passage(self, work: CallShape) -> Passage:
        """The pairs of a head, chunk by chunk and block by block."""
        return Passage(
            self.stays, work.n_queries, work.n_keys, self.queries, self.keys, work.is_causal
        )

    def memory_use(self, schedule: Schedule, problem: Problem) -> Footprint:
        """The chunk, the blocks, the workspace of a rectangle, and what the budget counts of
        results and states."""
        homes = home_bytes(problem, schedule.group, "host")
        small = (SMALL_BYTES,) * 4 if problem.scaled else ()
        chunk, block = (layout_of(schedule, problem, a) for a in (self.stays, self.streams_by))
        return Footprint(
            problem.work.device_type,
            problem.workspace(schedule.extent(problem.work)),
            chunk.slot_bytes + self.n_cap * block.slot_bytes,
            (*homes, *small),
            (problem.place.divided or 0, *result_bytes(problem)),
        )

    def work_counts(self, schedule: Schedule, problem: Problem) -> WorkCounts:
        """What stays is copied once; what streams by, for every chunk that it meets."""
        work, spec = problem.work, problem.spec
        passage, groups = self.passage(work), count_groups(work, schedule.group)
        staying, _ = moved_bytes(problem, self.stays)
        passing, states = moved_bytes(problem, self.streams_by)
        results = sum(s.count(work) * problem.place.result_dtype.itemsize for s in spec.states)
        units = passage.n_units
        visits = units / max(1, passage.n_blocks)
        up = staying + visits * passing + max(0.0, visits - 1) * states
        down = results + max(0.0, visits - 1) * states
        # Between two chunks nothing computes while results are stored and inputs loaded.
        alone = staying + results
        return WorkCounts(
            units=groups * units,
            calls=_calls(passage),
            up=up,
            down=down,
            resident=problem.place.resident,
            hidden_by=max(1, round((up + down) / max(1, alone))),
            in_slots=True,
            run_copies=sum(i.axis == self.streams_by for i in spec.inputs)
            + 2 * sum(s.axis == self.streams_by for s in spec.states),
        )

    def slots(self, **changes: Any) -> Slots:
        """The route that takes over."""
        return self.instead.slots(**changes)

    def run(
        self, job: Job, schedule: Schedule, controller: RecoveryController, tools: Tools
    ) -> Iterator[int]:
        """Compute the head groups that are left, one after the other."""
        work = job.work
        home = home_device("host", job.device)
        waiting = (self.streams_by,) if self.passage(work).n_chunks > 1 else ()
        chunk, block = (layout_of(schedule, job.problem, a) for a in (self.stays, self.streams_by))
        scaling = None
        if job.problem.scaled:
            heads = (1, schedule.group.kv_heads)
            scaling = BackwardScaling(work, job.device, heads, self.n_cap)
        with (
            moved_tensors(job, schedule.group, home, waiting) as moved,
            # The last slot is the chunk's.
            open_slots(job, moved, tools.clock, (block, self.n_cap), (chunk, 1)) as (rows, staying),
        ):
            engine = Engine(job, tools, schedule.limits, rows, scaling, staying)
            for _ in engine.run(self._units(engine, scaling, controller)):
                yield 1

    def _units(
        self, engine: Engine, scaling: BackwardScaling | None, controller: RecoveryController
    ) -> Iterator[Unit]:
        """Every block of every chunk of the head groups that are left. A group that overflowed is
        run again, scaled down further."""
        job, every = engine.job, len(controller.groups_left)
        for done, group in enumerate(controller.whole_groups(), start=1):

            def read(group: Group = group) -> Tensors:
                engine.rows.mover.finish(wait=True)
                return what_is_read(job.tensors, group)

            if scaling is not None:
                scaling.begin()
            for again in (0,) if scaling is None else scaling.runs(read):
                job.repeated(again > 0)
                yield from self._units_of(engine, group)
            job.tell(done, every)

    def _units_of(self, engine: Engine, group: Group) -> Iterator[Unit]:
        """Every block of every chunk of one head group."""
        blocks, staying = engine.rows, engine.staying
        assert staying is not None
        work = engine.job.work
        passage, whole = self.passage(work), Decomposition(work.n_tokens).task(())
        number, last_units = 0, dict[int | None, int]()
        for chunk in range(passage.n_chunks):
            place, slot = passage.chunk(chunk), self.n_cap
            held = _unit(staying, group, slot, slot, place, is_first=True, is_last=True)
            meets = passage.blocks(chunk)
            for block in meets or [None]:
                slot = number % self.n_cap
                rectangles: tuple[Rectangle, ...] = ()
                place, is_last = Interval(0, 0), True
                if block is not None:
                    place, rectangles = passage.block(block), passage.rectangles(chunk, block)
                    is_last = chunk == passage.last_chunk(block)
                # Stores follow each other: all that are older than this slot's last one are over
                # with it.
                before = last_units.get(block, -1)
                after = before % self.n_cap if before > number - self.n_cap else slot
                opens = block is None or block == meets[0]
                closes = block is None or block == meets[-1]
                unit = _unit(
                    blocks, group, slot, after, place, is_first=chunk == 0, is_last=is_last
                )
                yield replace(unit, beside=Beside(held, whole, rectangles, opens, closes))
                last_units[block] = number
                number += 1


def _unit(
    side: SlotRows,
    group: Group,
    slot: int,
    after: int,
    place: Interval,
    *,
    is_first: bool,
    is_last: bool,
) -> Unit:
    """Neighbouring rows of one side in a slot; their states begin, and end, with this unit or wait
    between units."""
    rows, none = (Rows(*place, 0),), ()
    visit = Visit(
        Task((), (Span(*place, 0),)),
        fresh=rows if is_first else none,
        carried=(),
        loaded=none if is_first else rows,
        finished=rows if is_last else none,
        stored=none if is_last else rows,
    )
    return Unit(group, visit, slot, side.fields(slot, group, visit), after)


@lru_cache(maxsize=256)
def _calls(passage: Passage) -> tuple[tuple[Batch, int], ...]:
    """The rectangles of a head, as calls: how many of each size there are."""
    found: Counter[Batch] = Counter()
    for number in range(passage.n_chunks):
        plain = passage.plain_blocks(number)
        # One stands for all.
        times = {plain[0]: len(plain)} if plain else {}
        times |= dict.fromkeys((b for b in passage.blocks(number) if b not in plain), 1)
        for block, n in times.items():
            for r in passage.rectangles(number, block):
                found[Batch(Rectangle(0, r.n_queries, 0, r.n_keys, r.causal))] += n
    return tuple(found.items())
