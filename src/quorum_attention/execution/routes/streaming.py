"""The route ``streaming``: a chunk of rows stays on the device, and the other side streams by it.

In a forward queries stay, and keys and values stream by: the statistics of a chunk never leave the
device. In a backward keys and values stay with their gradients, and queries stream by with theirs,
which wait in host memory between chunks. Where memory is tight that moves far fewer bytes than
tasks through slots, in fewer and longer copies, and the kernel gets larger rectangles
(docs/planner.md). If memory runs out, or a scaled gradient overflows in a way that only single
tasks can mend, what is left goes through slots, by the decomposition that the schedule has for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition, Rectangle, Rows
from quorum_attention.decomposition.decomposition import Span, Task
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.pieces import Passage
from quorum_attention.execution.call import Job, Tools
from quorum_attention.execution.control.controller import Group, RecoveryController
from quorum_attention.execution.control.visits import Visit
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.residency import Residency
from quorum_attention.execution.engine import Engine
from quorum_attention.execution.problem import (
    Axis,
    Bytes,
    GroupSize,
    InputSpec,
    Problem,
    StateSpec,
    WorkCounts,
    Workload,
    bytes_before,
    count_groups,
    final_bytes,
    result_bytes,
    state_bytes,
)
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.scaling import GroupScaling, asking, what_is_read
from quorum_attention.execution.schedule import Route, Schedule
from quorum_attention.execution.slot_rows import (
    Beside,
    Input,
    SlotLayout,
    SlotRows,
    State,
    Unit,
    arena_and_mover,
    moved_tensors,
    slot_layout,
)
from quorum_attention.sizes import counted

# At least the bytes of each small tensor that a scaled backward makes.
_SMALL_BYTES = 512


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

    def __post_init__(self) -> None:
        if min(self.queries, self.keys, self.n_cap) < 1:
            raise ValueError(
                f"queries, keys and n_cap must be at least 1, got {self.queries}, {self.keys} and "
                f"{self.n_cap}"
            )
        if self.stays not in ("query", "key"):
            raise ValueError(f"stays must be 'query' or 'key', got {self.stays!r}")

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

    def parts(self, schedule: Schedule, work: Workload) -> str:
        """How often a block streams by."""
        return f"{counted(self.passage(work).n_units, 'time')} a block and a chunk"

    @property
    def streams_by(self) -> Axis:
        """The other side."""
        return "key" if self.stays == "query" else "query"

    def rows(self, axis: Axis) -> int:
        """Rows of a chunk or block of this side."""
        return self.queries if axis == "query" else self.keys

    def check(self, shape: Decomposition, group: GroupSize) -> None:
        """Refuse a head group of several batch entries."""
        if group.batch != 1:
            raise ValueError(f"a head group has to be of one batch entry, got {group.batch}")

    def task_rows(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """A chunk and a block."""
        return min(self.queries, work.n_queries), min(self.keys, work.n_keys)

    def limits(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """A chunk and a block are one rectangle."""
        return self.task_rows(shape, work)

    def runs(self, schedule: Schedule, case: Problem) -> bool:
        """Whether the kernel takes rectangles one by one, wherever they are, and nothing else
        depends on where they are."""
        work, kernel = case.work, case.kernel
        anywhere = kernel.operator and kernel.several_streams and not kernel.own_attention
        plain = work.mask is None and not work.dropout and not kernel.sparse
        sides = self.stays == ("key" if case.spec.backward else "query")
        return anywhere and plain and sides and min(work.n_queries, work.n_keys) > 0

    def passage(self, work: Workload) -> Passage:
        """The pairs of a head, chunk by chunk and block by block."""
        return Passage(
            self.stays, work.n_queries, work.n_keys, self.queries, self.keys, work.is_causal
        )

    def layout(self, schedule: Schedule, case: Problem, axis: Axis) -> SlotLayout:
        """The memory of a chunk or of a block."""
        work = case.work
        most = min(self.rows(axis), work.n_queries if axis == "query" else work.n_keys)
        dtype, group = case.place.result_dtype, schedule.group
        return slot_layout(case.spec, work, group, (most, most), dtype, axis=axis)

    def memory_use(self, schedule: Schedule, case: Problem) -> Bytes:
        """The chunk, the blocks, the workspace of a rectangle, and what the budget counts of
        results and states."""
        homes: tuple[int, ...] = ()
        if case.place.counts("host"):
            homes = final_bytes(case)
            if case.place.result_dtype != case.work.state_dtype:
                homes += state_bytes(case, schedule.group)
        small = (_SMALL_BYTES,) * 4 if case.scaled else ()
        chunk, block = (self.layout(schedule, case, a) for a in (self.stays, self.streams_by))
        return Bytes(
            case.workspace(schedule.extent(case.work)),
            chunk.slot_bytes + self.n_cap * block.slot_bytes,
            (*homes, *small),
            (*bytes_before(case), *result_bytes(case)),
        )

    def work_counts(self, schedule: Schedule, case: Problem) -> WorkCounts:
        """What stays is copied once; what streams by, for every chunk that it meets."""
        work, spec = case.work, case.spec
        passage, groups = self.passage(work), count_groups(work, schedule.group)
        inputs = {axis: _bytes_of(spec.inputs, axis, work) for axis in ("query", "key")}
        states = sum(
            s.count(work) * work.state_dtype.itemsize for s in spec.states if s.axis != self.stays
        )
        results = sum(s.count(work) * case.place.result_dtype.itemsize for s in spec.states)
        units = passage.n_units
        visits = units / max(1, passage.n_blocks)
        up = inputs[self.stays] + visits * inputs[self.streams_by] + max(0.0, visits - 1) * states
        down = results + max(0.0, visits - 1) * states
        # Between two chunks nothing computes while results are stored and inputs loaded.
        alone = inputs[self.stays] + results
        return WorkCounts(
            units=groups * units,
            calls=_calls(passage),
            up=up,
            down=down,
            resident=case.place.resident,
            hidden_by=max(1, round((up + down) / max(1, alone))),
            set_up=groups * units,
            run_copies=_count(spec.inputs, self.streams_by)
            + 2 * _count(spec.states, self.streams_by),
            passes=1,
        )

    def slots(self, **changes: Any) -> Slots:
        """The route that takes over."""
        return self.instead.slots(**changes)

    def run(
        self, job: Job, schedule: Schedule, controller: RecoveryController, tools: Tools
    ) -> Iterator[int]:
        """Compute the head groups that are left, one after the other."""
        home = Residency.of_home("host", job.call.device)
        waiting = (self.streams_by,) if self.passage(job.call.work).n_chunks > 1 else ()
        chunk, block = (
            self.layout(schedule, job.problem, a) for a in (self.stays, self.streams_by)
        )
        n_bytes = chunk.slot_bytes + self.n_cap * block.slot_bytes
        with (
            moved_tensors(job, schedule.group, home, waiting) as (inputs, states, locks),
            # The last slot is the chunk's.
            arena_and_mover(job, n_bytes, self.n_cap + 1, locks, tools.clock) as (arena, mover),
        ):
            slots = block.slots(arena, self.n_cap)
            blocks = _side(job, block, self.streams_by, slots, mover, inputs, states)
            slots = {self.n_cap: arena[self.n_cap * block.slot_bytes :]}
            staying = _side(job, chunk, self.stays, slots, mover, inputs, states)
            scaling = None
            if job.problem.scaled:
                heads = (1, schedule.group.kv_heads)
                scaling = GroupScaling(job.call.work, job.call.device, heads, self.n_cap)
            engine = Engine(job, tools, mover, schedule.limits, blocks, scaling, staying)
            for _ in engine.run(self._units(engine, scaling, controller)):
                yield 1

    def _units(
        self, engine: Engine, scaling: GroupScaling | None, controller: RecoveryController
    ) -> Iterator[Unit]:
        """Every block of every chunk of the head groups that are left. A group that overflowed is
        run again, scaled down further."""
        job, mover = engine.job, engine.mover
        every = len(controller.groups_left)
        for done, group in enumerate(controller.whole_groups(), start=1):
            if scaling is not None:
                scaling.begin(group.kv_stop - group.kv_start)
            while True:
                yield from self._units_of(engine, group)
                if scaling is None:
                    break
                with mover.compute_stage(self.n_cap):
                    overflowed = scaling.overflowed()
                if not overflowed:
                    break
                mover.finish(wait=True)
                if not scaling.repeats(what_is_read(job.tensors, group), asking(controller, group)):
                    break
                job.repeated(1)
            job.tell(done, every)

    def _units_of(self, engine: Engine, group: Group) -> Iterator[Unit]:
        """Every block of every chunk of one head group."""
        blocks, staying = engine.rows, engine.staying
        assert staying is not None
        work = engine.job.call.work
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


def _side(
    job: Job,
    layout: SlotLayout,
    axis: Axis,
    slots: dict[int, torch.Tensor],
    mover: Mover,
    inputs: tuple[Input, ...],
    states: tuple[State, ...],
) -> SlotRows:
    """What moves the rows of queries or of keys."""
    return SlotRows(
        job.call.work,
        layout,
        tuple(item for item in inputs if item.rows.axis == axis),
        tuple(state for state in states if state.axis == axis),
        slots,
        mover,
        factor=job.factor if job.problem.place.is_divided else None,
    )


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


def _bytes_of(items: tuple[InputSpec, ...], axis: Axis, work: Workload) -> int:
    return sum(i.count(work) * i.dtype(work).itemsize for i in items if i.axis == axis)


def _count(items: tuple[InputSpec, ...] | tuple[StateSpec, ...], axis: Axis) -> int:
    return sum(item.axis == axis for item in items)


@lru_cache(maxsize=256)
def _calls(passage: Passage) -> tuple[tuple[int, int, bool, int], ...]:
    """The rectangles of a head: (queries, keys, causal, how many)."""
    found: Counter[tuple[int, int, bool]] = Counter()
    for number in range(passage.n_chunks):
        blocks, plain = passage.blocks(number), passage.plain_blocks(number)
        if plain:
            # One stands for all.
            (one,) = passage.rectangles(number, plain[0])
            found[one.n_queries, one.n_keys, False] += len(plain)
        for block in blocks:
            if block not in plain:
                for r in passage.rectangles(number, block):
                    found[r.n_queries, r.n_keys, r.causal] += 1
    return tuple((*size, count) for size, count in found.items())
