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
from quorum_attention.decomposition.passage import Passage
from quorum_attention.execution.case import Case
from quorum_attention.execution.control.machine import HERE, Machine
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.residency import Residency
from quorum_attention.execution.job import Job
from quorum_attention.execution.pass_spec import InputSpec, StateSpec
from quorum_attention.execution.routes.slots import Slots, accumulator, with_columns
from quorum_attention.execution.rows import Axis, GroupBuffer, RowTensor, group_part
from quorum_attention.execution.scaling import Computed, Steps, asking
from quorum_attention.execution.schedule import Route, Schedule
from quorum_attention.execution.slots import SlotLayout, axis_layout
from quorum_attention.execution.takes import (
    Bytes,
    Load,
    bytes_before,
    final_bytes,
    result_bytes,
    state_bytes,
)
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.workload import Group, GroupSize, Workload, count_groups
from quorum_attention.kernels.scaling import Scaling, value_norms
from quorum_attention.kernels.traits import traits_of

# At least the bytes of each small tensor that a scaled backward makes.
_SMALL_BYTES = 512


class OverflowedError(torch.OutOfMemoryError):
    """A scaled gradient overflowed where inputs are not finite: tasks through slots find out which
    rows that leaves. It is recovered from as if memory had run out."""


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
        work, traits = case.work, traits_of(case.kernel)
        anywhere = traits.operator and traits.several_streams and not traits.own_attention
        plain = work.mask is None and not work.dropout and not traits.sparse
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
        return axis_layout(case.spec, work, schedule.group, axis, most, case.place.result_dtype)

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
        call, spec, report = job.call, job.spec, job.report
        backend = backend_of(call.device)
        given = {id(result) for result in job.results.tensors.values()}
        results = job.results.make()
        every = len(machine.groups_left)
        tensors = _Tensors.of(job, schedule, self)
        read = [rows.tensor for rows in tensors.inputs.values()]
        homes = [home.tensor for home in tensors.homes.values() if isinstance(home, GroupBuffer)]
        as_they_are = [
            tensor
            for tensor, item in zip(read, spec.inputs, strict=True)
            if tensor.dtype == item.dtype(call.work)
        ]
        made = [result for result in results if id(result) not in given]
        there = [result for result in results if id(result) in given]
        moved = [*read, *results, *homes]
        with backend.page_locks(moved, made, as_they_are, there, read) as locks:
            chunk, block = (
                self.layout(schedule, job.case, a) for a in (self.stays, self.passes_by)
            )
            n_bytes = chunk.slot_bytes + self.n_cap * block.slot_bytes
            mover: Mover | None = None
            try:
                arena = backend.allocate(n_bytes, call.device)
                # The last slot is the chunk's.
                mover = backend.mover(call.device, self.n_cap + 1, locks, tools.clock)
                one = _Passes(job, schedule, self, tools, mover, arena, tensors)
                for done, group in enumerate(machine.whole_groups(HERE), start=1):
                    units = one.compute(group, machine)
                    job.tell(done, every)
                    yield units
            finally:
                if mover is not None:
                    mover.finish(wait=True)
                    if report is not None:
                        report.loaded_bytes += mover.loaded_bytes
                        report.stored_bytes += mover.stored_bytes


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


@dataclass(frozen=True, slots=True)
class _Tensors:
    """What a pass reads and writes, by name.

    Attributes:
        inputs: what it reads.
        final: where finished rows go.
        homes: where the rows of states that pass by wait between chunks.
    """

    inputs: dict[str, RowTensor]
    final: dict[str, RowTensor]
    homes: dict[str, RowTensor | GroupBuffer]

    @classmethod
    def of(cls, job: Job, schedule: Schedule, route: Passing) -> _Tensors:
        """Those of a job whose results are made."""
        call, spec = job.call, job.spec
        inputs = {
            item.name: RowTensor(with_columns(job.tensors[item.name], item), item.axis)
            for item in spec.inputs
        }
        final = {
            state.name: RowTensor(with_columns(result, state), state.axis)
            for state, result in zip(spec.states, job.results.make(), strict=True)
        }
        homes: dict[str, RowTensor | GroupBuffer] = {}
        several = route.passage(call.work).n_chunks > 1
        for state in spec.states:
            if state.axis == route.stays or not several:
                continue
            homes[state.name] = (
                final[state.name]
                if job.results.dtype_of(state) == call.work.state_dtype
                else GroupBuffer(
                    accumulator(job, schedule, state, Residency.of_home("host", call.device)),
                    state.axis,
                )
            )
        return cls(inputs, final, homes)


class _Passes:
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
        tensors: _Tensors,
    ) -> None:
        self.job, self.schedule, self.route = job, schedule, route
        self.tools, self.mover, self.tensors = tools, mover, tensors
        self.work, self.spec = job.call.work, job.spec
        self.passage = route.passage(self.work)
        self.whole = Decomposition(self.work.n_tokens).task(())
        self.chunk_slot = route.n_cap
        self.layouts = {
            a: route.layout(schedule, job.case, a) for a in (route.stays, route.passes_by)
        }
        size = self.layouts[route.passes_by].slot_bytes
        self.slots = [arena[i * size : (i + 1) * size] for i in range(route.n_cap)]
        self.slots.append(arena[route.n_cap * size :])
        self._views: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}
        self._blocks: dict[int, list[torch.Tensor]] = {}
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
            self.flags = torch.zeros(shape, dtype=torch.int32, pin_memory=pins)

    # --- A head group -------------------------------------------------------------------------

    def compute(self, group: Group, machine: Machine) -> int:
        """Compute a head group and store its results; returns how many units that took."""
        self.group, self.heads = group, group.kv_stop - group.kv_start
        self._blocks.clear()
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
        every = [*self.tensors.inputs.values(), *self.tensors.final.values()]
        self.mover.left(block for rows in every for block in self._blocks_of(rows))
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
        group, tensors, final = self.group, self.job.tensors, self.tensors.final

        def part(name: str, axis: Axis) -> torch.Tensor:
            return group_part(tensors[name], group, axis)

        def gradient(name: str, axis: Axis) -> torch.Tensor:
            return group_part(final[name].tensor, group, axis)

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
        start, stop = self.passage.chunk(number)
        slot, axis, mover = self.chunk_slot, self.route.stays, self.mover
        staying = self._fields(slot, axis, stop - start)
        rows = (Rows(start, stop, 0),)
        with mover.input_stage(slot):
            self._load_inputs(staying, axis, rows)
        with mover.state_stage(slot, slot):
            pass
        states = [state for state in self.spec.states if state.axis == axis]
        with mover.compute_stage(slot), self.tools.clock.timed("gather"):
            for state in states:
                self._fill(staying, state)
            if self.job.scaled:
                self.norms = value_norms(staying["value"])
        blocks = self.passage.blocks(number)
        for block in blocks:
            self._unit(number, block, staying)
        with mover.compute_stage(slot), self.tools.clock.timed("scatter"):
            for state in states:
                self._finish(staying, state)
        with mover.store_stage(slot):
            for state in states:
                self._store(staying, state, self.tensors.final[state.name], rows)
        return len(blocks)

    def _unit(self, chunk: int, block: int, staying: dict[str, torch.Tensor]) -> None:
        """Let one block pass by the chunk."""
        route, mover, clock = self.route, self.mover, self.tools.clock
        number, slot = self.number, self.number % route.n_cap
        self.number += 1
        axis = route.passes_by
        start, stop = self.passage.block(block)
        rows = (Rows(start, stop, 0),)
        fields = self._fields(slot, axis, stop - start)
        states = [state for state in self.spec.states if state.axis == axis]
        is_first = chunk == 0
        is_last = bool(states) and chunk == self.passage.last_chunk(block)
        with mover.input_stage(slot):
            self._load_inputs(fields, axis, rows)
        # Stores follow each other: all that are older than this slot's last one are over with it.
        before = self.last_unit.get(block, -1)
        after = before % route.n_cap if before > number - route.n_cap else slot
        with mover.state_stage(slot, after):
            if not is_first:
                for state in states:
                    home = self._blocks_of(self.tensors.homes[state.name])
                    for entry, there in enumerate(home):
                        mover.load(fields[f"state_{state.name}"][entry], there, rows)
        self.last_unit[block] = number
        with mover.compute_stage(slot):
            with clock.timed("gather"):
                if is_first:
                    for state in states:
                        self._fill(fields, state)
                told = self._scaled(slot, fields, staying)
            with clock.timed("compute"):
                self._accumulate(chunk, block, {**staying, **fields}, told)
            with clock.timed("scatter"):
                if is_last:
                    for state in states:
                        self._finish(fields, state)
        with mover.store_stage(slot):
            for state in states:
                if is_last:
                    self._store(fields, state, self.tensors.final[state.name], rows)
                else:
                    home = self._blocks_of(self.tensors.homes[state.name])
                    for entry, there in enumerate(home):
                        mover.store(there, fields[f"state_{state.name}"][entry], rows)

    def _scaled(
        self, slot: int, fields: dict[str, torch.Tensor], staying: dict[str, torch.Tensor]
    ) -> Scaling:
        """Divide a block's upstream gradient; how the kernel has to undo that."""
        if not self.job.scaled:
            return Scaling()
        unscale = self.unscale[slot][:, : self.heads]
        self.steps.divide_(fields["grad_out"], staying["value"], unscale, self.norms)
        return Scaling(self.steps.shift, unscale, self.overflow[:, : self.heads])

    def _accumulate(
        self, chunk: int, block: int, fields: dict[str, torch.Tensor], told: Scaling
    ) -> None:
        """Add the pairs of a chunk and a block."""
        job, spec = self.job, self.spec
        assert self.group is not None
        given = {item.name: fields[item.name] for item in spec.inputs[3:]}
        if "lse" in given:
            given["lse"] = given["lse"].squeeze(-1)
        states = [
            state.squeeze(-1) if one.width == "one" else state
            for one in spec.states
            for state in (fields[f"state_{one.name}"],)
        ]
        three = (fields["query"], fields["key"], fields["value"])
        rectangles = self.passage.rectangles(chunk, block)
        limits = self.schedule.limits
        task = job.task(limits, self.group, self.tools, self.whole, rectangles, three)
        spec.accumulate(job.call.kernel, task, given, states, told)

    # --- Rows ---------------------------------------------------------------------------------

    def _fields(self, slot: int, axis: Axis, rows: int) -> dict[str, torch.Tensor]:
        key = (slot, rows, self.heads)
        if key not in self._views:
            layout = self.layouts[axis]
            self._views[key] = {
                name: layout.carve(self.slots[slot], name, 1, self.heads, rows)
                for name in layout.fields
            }
        return self._views[key]

    def _blocks_of(self, rows: RowTensor | GroupBuffer) -> list[torch.Tensor]:
        assert self.group is not None
        key = id(rows)
        if key not in self._blocks:
            self._blocks[key] = rows.blocks(self.group)
        return self._blocks[key]

    def _load_inputs(
        self, fields: dict[str, torch.Tensor], axis: Axis, rows: tuple[Rows, ...]
    ) -> None:
        for item in self.spec.inputs:
            if item.axis == axis:
                for entry, there in enumerate(self._blocks_of(self.tensors.inputs[item.name])):
                    self.mover.load(fields[item.name][entry], there, rows)

    def _fill(self, fields: dict[str, torch.Tensor], state: StateSpec) -> None:
        assert self.group is not None
        fields[f"state_{state.name}"][:] = self.job.fill(state, self.group)

    def _finish(self, fields: dict[str, torch.Tensor], state: StateSpec) -> None:
        """Write the rows of a state in their final form."""
        assert self.group is not None
        current = fields[f"state_{state.name}"]
        final = fields.get(f"final_{state.name}", current)
        factor = self.job.factor(self.group, state.axis) if self.job.is_divided else None
        if factor is not None:
            torch.mul(current, factor, out=final)
        elif final is not current:
            final.copy_(current)

    def _store(
        self,
        fields: dict[str, torch.Tensor],
        state: StateSpec,
        target: RowTensor,
        rows: tuple[Rows, ...],
    ) -> None:
        finished = fields.get(f"final_{state.name}", fields[f"state_{state.name}"])
        for entry, there in enumerate(self._blocks_of(target)):
            self.mover.store(there, finished[entry], rows)
