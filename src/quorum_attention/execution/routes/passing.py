"""The route ``passing``: a chunk of rows stays on the device, and the other side passes by it.

In a forward queries stay, and keys and values pass by: the statistics of a chunk never leave the
device. In a backward keys and values stay with their gradients, and queries pass by with theirs,
which wait in host memory between chunks. Where memory is tight that moves far fewer bytes than
tasks through slots, in fewer and longer copies, and the kernel gets larger rectangles
(docs/planner.md). If memory runs out, or a scaled gradient overflows in a way that only single
tasks can mend, what is left goes through slots, by the decomposition that the schedule has for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from quorum_attention.decomposition import Decomposition, Rows
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.pieces import Passage
from quorum_attention.decomposition.tasks import Span, Task
from quorum_attention.execution.case import (
    Bytes,
    Case,
    Load,
    bytes_before,
    final_bytes,
    result_bytes,
    state_bytes,
)
from quorum_attention.execution.control.machine import HERE, Machine
from quorum_attention.execution.control.visits import Visit
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.residency import Residency
from quorum_attention.execution.job import Job, Tools
from quorum_attention.execution.pass_spec import InputSpec, StateSpec
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.scaling import Computed, Steps, asking
from quorum_attention.execution.schedule import Route, Schedule
from quorum_attention.execution.slot_rows import (
    Input,
    SlotLayout,
    SlotRows,
    State,
    Unit,
    accumulate,
    arena_and_mover,
    moved_tensors,
    slot_layout,
)
from quorum_attention.execution.workload import (
    Axis,
    Group,
    GroupSize,
    Workload,
    count_groups,
    group_part,
)
from quorum_attention.kernels.scaling import Scaling, value_norms


class OverflowedError(torch.OutOfMemoryError):
    """A scaled gradient overflowed where inputs are not finite: tasks through slots find out which
    rows that leaves. It is recovered from as if memory had run out."""


class StreamRunner:
    """The head groups of one pass, one after the other.

    Args:
        arena: (bytes,) uint8: the blocks, and after them the chunk.
    """

    def __init__(
        self,
        job: Job,
        schedule: Schedule,
        route: Passing,
        tools: Tools,
        mover: Mover,
        arena: torch.Tensor,
        tensors: tuple[tuple[Input, ...], tuple[State, ...]],
    ) -> None:
        self.job, self.schedule, self.route = job, schedule, route
        self.tools, self.mover = tools, mover
        self.work, self.spec = job.call.work, job.spec
        self.passage = route.passage(self.work)
        self.whole = Decomposition(self.work.n_tokens).task(())
        self.chunk_slot = route.n_cap
        block = route.layout(schedule, job.case, route.passes_by)
        chunk = arena[route.n_cap * block.slot_bytes :]
        self.staying = self._side(route.stays, {self.chunk_slot: chunk}, tensors)
        self.blocks = self._side(route.passes_by, block.slots(arena, route.n_cap), tensors)
        self.heads = 0
        self.group: Group | None = None
        # How often the unit in each slot has been computed: the number of the unit.
        self.number = 0
        self.last_unit: dict[int, int] = {}
        self.steps = Steps(self.work.n_keys)
        self.norms: torch.Tensor | None = None
        if job.scaled:
            device, shape = job.call.device, (1, schedule.group.kv_heads)
            self.unscale = [
                torch.empty(shape, dtype=torch.float32, device=device) for _ in range(route.n_cap)
            ]
            self.overflow = torch.zeros(shape, dtype=torch.int32, device=device)
            pins = backend_of(device).pins
            self.flags = torch.zeros(shape, dtype=torch.int32, pin_memory=pins, device="cpu")

    def _side(
        self,
        axis: Axis,
        slots: dict[int, torch.Tensor],
        tensors: tuple[tuple[Input, ...], tuple[State, ...]],
    ) -> SlotRows:
        """What moves the rows of queries or of keys."""
        return SlotRows(
            self.work,
            self.route.layout(self.schedule, self.job.case, axis),
            tuple(item for item in tensors[0] if item.rows.axis == axis),
            tuple(state for state in tensors[1] if state.axis == axis),
            slots,
            self.mover,
            factor=self.job.factor if self.job.is_divided else None,
        )

    # --- A head group -------------------------------------------------------------------------

    def compute(self, group: Group, machine: Machine) -> int:
        """Compute a head group and store its results; returns how many units that took."""
        self.group, self.heads = group, group.kv_stop - group.kv_start
        self.last_unit.clear()
        self.steps = Steps(self.work.n_keys)
        units = 0
        while True:
            if self.job.scaled:
                with self.mover.compute_stage(self.chunk_slot):
                    self.overflow.zero_()
            for chunk in range(self.passage.n_chunks):
                units += self._chunk(chunk)
            if not self.job.scaled or not self._spoiled() or not self._lower(machine):
                break
            self.job.repeated(1)
        for side in (self.staying, self.blocks):
            side.leave(group)
        return units

    def _spoiled(self) -> bool:
        """Whether a gradient of the head group overflowed; the host waits for it."""
        with self.mover.compute_stage(self.chunk_slot):
            self.flags.copy_(self.overflow, non_blocking=True)
        self.mover.wait_computed(self.chunk_slot)
        return bool(self.flags[:, : self.heads].any())

    def _lower(self, machine: Machine) -> bool:
        """Scale the heads at fault down further, if that may help.

        Raises:
            OverflowedError: their inputs are not finite, so it takes tasks to tell.
        """
        self.mover.finish(wait=True)
        assert self.group is not None
        group, tensors = self.group, self.job.tensors
        results = dict(zip(("query", "key", "value"), self.job.results.make(), strict=True))

        def part(name: str, axis: Axis) -> torch.Tensor:
            return group_part(tensors[name], group, axis)

        def gradient(name: str, axis: Axis) -> torch.Tensor:
            return group_part(results[name], group, axis)

        found = Computed(
            part("query", "query"), part("out", "query"), part("grad_out", "query"),
            part("lse", "query").unsqueeze(-1), part("key", "key"), part("value", "key"),
            gradient("query", "query"), gradient("key", "key"), gradient("value", "key"),
        )  # fmt: skip
        overflow = self.flags[:, : self.heads]
        if not all(found.head(e, h).finite() for e, h in overflow.nonzero().tolist()):
            raise OverflowedError("a scaled gradient overflowed, beside inputs that are not finite")
        return self.steps.lower(overflow, found, asking(machine, group))

    # --- A chunk ------------------------------------------------------------------------------

    def _chunk(self, number: int) -> int:
        """Hold a chunk, let the blocks pass by, and store what is finished of it."""
        slot, rows, mover, clock = self.chunk_slot, self.staying, self.mover, self.tools.clock
        unit = self._unit(rows, slot, self.passage.chunk(number), is_first=True, is_last=True)
        rows.load_inputs(unit)
        rows.load_states(unit, slot)
        with mover.compute_stage(slot), clock.timed("gather"):
            rows.fill(unit)
            if self.job.scaled:
                self.norms = value_norms(unit.fields["value"])
        blocks = self.passage.blocks(number)
        for block in blocks:
            self._block(number, block, unit.fields)
        with mover.compute_stage(slot), clock.timed("scatter"):
            rows.finish(unit)
        rows.store(unit)
        return len(blocks)

    def _block(self, chunk: int, block: int, staying: dict[str, torch.Tensor]) -> None:
        """Let one block pass by the chunk."""
        n_cap, rows, clock = self.route.n_cap, self.blocks, self.tools.clock
        number, slot = self.number, self.number % n_cap
        self.number += 1
        is_last = chunk == self.passage.last_chunk(block)
        place = self.passage.block(block)
        unit = self._unit(rows, slot, place, is_first=chunk == 0, is_last=is_last)
        rows.load_inputs(unit)
        # Stores follow each other: all that are older than this slot's last one are over with it.
        before = self.last_unit.get(block, -1)
        rows.load_states(unit, before % n_cap if before > number - n_cap else slot)
        self.last_unit[block] = number
        with self.mover.compute_stage(slot):
            with clock.timed("gather"):
                rows.fill(unit)
                told = self._scaled(slot, unit.fields, staying)
            with clock.timed("compute"):
                self._accumulate(chunk, block, {**staying, **unit.fields}, told)
            with clock.timed("scatter"):
                rows.finish(unit)
        rows.store(unit)

    def _unit(
        self, side: SlotRows, slot: int, place: Interval, *, is_first: bool, is_last: bool
    ) -> Unit:
        """Neighbouring rows of one side in a slot; their states begin, and end, with this unit or
        wait between units."""
        assert self.group is not None
        rows, none = (Rows(*place, 0),), ()
        visit = Visit(
            Task((), (Span(*place, 0),)),
            fresh=rows if is_first else none,
            carried=(),
            loaded=none if is_first else rows,
            finished=rows if is_last else none,
            stored=none if is_last else rows,
        )
        return Unit(self.group, visit, slot, side.fields(slot, self.group, visit))

    def _scaled(
        self, slot: int, fields: dict[str, torch.Tensor], staying: dict[str, torch.Tensor]
    ) -> Scaling:
        """Divide a block's upstream gradient; how the kernel has to undo that."""
        if not self.job.scaled:
            return Scaling()
        unscale = self.unscale[slot][:, : self.heads]
        self.steps.divide_(fields["grad_out"], staying["value"], unscale, self.norms)
        overflow = self.overflow[:, : self.heads]
        return Scaling(self.steps.shift, unscale, overflow)

    def _accumulate(
        self, chunk: int, block: int, fields: dict[str, torch.Tensor], told: Scaling
    ) -> None:
        """Add the pairs of a chunk and a block."""
        assert self.group is not None
        three = (fields["query"], fields["key"], fields["value"])
        rectangles = self.passage.rectangles(chunk, block)
        limits = self.schedule.limits
        task = self.job.task(limits, self.group, self.tools, self.whole, rectangles, three)
        accumulate(self.job, task, fields, told)


# At least the bytes of each small tensor that a scaled backward makes.
_SMALL_BYTES = 512


@dataclass(frozen=True, slots=True)
class Passing(Route):
    """A chunk of queries (forward) or of keys (backward) stays; blocks of the others pass by.

    Attributes:
        stays: the side whose chunks stay: of queries, or of keys.
        queries, keys: rows of a chunk, and of a block.
        instead: the route through slots that takes over.
        n_cap: blocks resident at once.
    """

    stays: Axis
    queries: int
    keys: int
    instead: Slots
    n_cap: int = 2

    recovery = "passing by: failed", "through slots"

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
        return f"{chunk} stay, {block} at a time pass by (tasks only if that fails)"

    def parts(self, schedule: Schedule, work: Workload) -> str:
        """How often a block passes by."""
        return f"{self.passage(work).n_units:,} time(s) a block and a chunk"

    @property
    def passes_by(self) -> Axis:
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

    def runs(self, schedule: Schedule, case: Case) -> bool:
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

    def layout(self, schedule: Schedule, case: Case, axis: Axis) -> SlotLayout:
        """The memory of a chunk or of a block."""
        work = case.work
        most = min(self.rows(axis), work.n_queries if axis == "query" else work.n_keys)
        dtype, group = case.place.result_dtype, schedule.group
        return slot_layout(case.spec, work, group, (most, most), dtype, axis=axis)

    def takes(self, schedule: Schedule, case: Case) -> Bytes:
        """The chunk, the blocks, the workspace of a rectangle, and what the budget counts of
        results and states."""
        homes: tuple[int, ...] = ()
        if case.place.counts("host"):
            homes = final_bytes(case)
            if case.place.result_dtype != case.work.state_dtype:
                homes += state_bytes(case, schedule.group)
        small = (_SMALL_BYTES,) * 4 if case.scaled else ()
        chunk, block = (self.layout(schedule, case, a) for a in (self.stays, self.passes_by))
        return Bytes(
            case.workspace(schedule.extent(case.work)),
            chunk.slot_bytes + self.n_cap * block.slot_bytes,
            (*homes, *small),
            (*bytes_before(case), *result_bytes(case)),
        )

    def load(self, schedule: Schedule, case: Case) -> Load:
        """What stays is copied once; what passes by, for every chunk that it meets."""
        work, spec = case.work, case.spec
        passage, groups = self.passage(work), count_groups(work, schedule.group)
        inputs = {axis: _bytes_of(spec.inputs, axis, work) for axis in ("query", "key")}
        states = sum(
            s.count(work) * work.state_dtype.itemsize for s in spec.states if s.axis != self.stays
        )
        results = sum(s.count(work) * case.place.result_dtype.itemsize for s in spec.states)
        units = passage.n_units
        visits = units / max(1, passage.n_blocks)
        up = inputs[self.stays] + visits * inputs[self.passes_by] + max(0.0, visits - 1) * states
        down = results + max(0.0, visits - 1) * states
        # Between two chunks nothing computes while results are stored and inputs loaded.
        alone = inputs[self.stays] + results
        return Load(
            units=groups * units,
            calls=_calls(passage),
            up=up,
            down=down,
            resident=case.place.resident,
            hidden_by=max(1, round((up + down) / max(1, alone))),
            set_up=groups * units,
            run_copies=_count(spec.inputs, self.passes_by)
            + 2 * _count(spec.states, self.passes_by),
            passes=1,
        )

    def slots(self, **changes: Any) -> Slots:
        """The route that takes over."""
        return self.instead.slots(**changes)

    def fallback(self, schedule: Schedule, work: Workload) -> Schedule:
        """Tasks through slots."""
        return schedule.through_slots(work)

    def run(self, job: Job, schedule: Schedule, machine: Machine, tools: Tools) -> Iterator[int]:
        """Compute the head groups that are left, one after the other."""
        home = Residency.of_home("host", job.call.device)
        waiting = (self.passes_by,) if self.passage(job.call.work).n_chunks > 1 else ()
        every = len(machine.groups_left)
        chunk, block = (self.layout(schedule, job.case, a) for a in (self.stays, self.passes_by))
        n_bytes = chunk.slot_bytes + self.n_cap * block.slot_bytes
        with (
            moved_tensors(job, schedule.group, home, waiting) as (inputs, states, locks),
            # The last slot is the chunk's.
            arena_and_mover(job, n_bytes, self.n_cap + 1, locks, tools.clock) as (arena, mover),
        ):
            one = StreamRunner(job, schedule, self, tools, mover, arena, (inputs, states))
            for done, group in enumerate(machine.whole_groups(HERE), start=1):
                units = one.compute(group, machine)
                job.tell(done, every)
                yield units


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
