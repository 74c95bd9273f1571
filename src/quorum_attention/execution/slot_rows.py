"""Rows of units in slots: loaded, filled, carried, finished and stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from quorum_attention.decomposition import Rows
from quorum_attention.execution.control.visits import Visit
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import PageLocks
from quorum_attention.execution.device.residency import Residency
from quorum_attention.execution.job import Job
from quorum_attention.execution.padding import is_filled
from quorum_attention.execution.pass_spec import RowSpec, StateSpec
from quorum_attention.execution.rows import Axis, GroupBuffer, RowTensor
from quorum_attention.execution.slots import SlotLayout
from quorum_attention.execution.workload import Group, GroupSize, Workload
from quorum_attention.kernels.protocol import TaskTensors
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.tensors import copy_on_device

# Most lists of views that are remembered: enough for a few head groups.
_MOST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of which every task reads its rows.

    Attributes:
        field: its field in the slot.
        rows: where they are read.
        of_scores: as that of its ``InputSpec``.
    """

    field: str
    rows: RowTensor
    of_scores: bool


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that accumulates row by row over the tasks.

    Attributes:
        field: its field in the slot.
        final_field: the field for finished rows in the result's dtype; slots have none if that is
            the state's dtype.
        fill: the value of a group's rows before their first visit, or (h, 1, 1), one for each head.
        home: where rows are stored between visits.
        final: where finished rows are stored; the home itself if the result has the state's dtype.
    """

    field: str
    final_field: str
    fill: Callable[[Group], float | torch.Tensor]
    home: RowTensor | GroupBuffer
    final: RowTensor

    @property
    def axis(self) -> Axis:
        """Whether the rows are those of queries or of keys."""
        return self.final.axis


@dataclass(frozen=True, slots=True)
class Unit:
    """One visit of one head group, in one slot.

    Attributes:
        fields: the slot's tensors by name, (entries, heads, rows, width).
        previous: the slot that its carried rows are copied from, and that slot's fields; None if it
            carries none.
    """

    group: Group
    visit: Visit
    slot: int
    fields: dict[str, torch.Tensor]
    previous: tuple[int, dict[str, torch.Tensor]] | None = None

    def from_home(self) -> Unit:
        """The same unit with its carried rows loaded instead, to run it again."""
        carried = tuple(piece.rows for piece in self.visit.carried)
        visit = replace(self.visit, loaded=(*self.visit.loaded, *carried), carried=())
        return replace(self, visit=visit, previous=None)


@dataclass(slots=True)
class SlotRows:
    """Moves the rows of units between their slots and the tensors outside.

    Attributes:
        work: the call's sizes.
        layout: of the slots.
        inputs: the tensors that are read.
        states: the tensors that accumulate.
        slots: their memory, uint8, by number.
        passed_on: inputs whose shared rows may be copied from the previous slot.
        factor: the factor of a group's finished rows, of queries or of keys: (entries, heads, 1, 1)
            in the state's dtype; None is 1.
    """

    work: Workload
    layout: SlotLayout
    inputs: tuple[Input, ...]
    states: tuple[State, ...]
    slots: Mapping[int, torch.Tensor]
    mover: Mover
    passed_on: frozenset[str] = frozenset()
    factor: Callable[[Group, Axis], torch.Tensor | None] | None = None

    # By slot, entries, heads, queries and keys.
    _views: dict[tuple[int, ...], dict[str, torch.Tensor]] = field(default_factory=dict)
    # By identity of the row tensor: these are held here, so no id is used twice.
    _blocks: dict[tuple[int, Group], list[torch.Tensor]] = field(default_factory=dict)

    def fields(self, slot: int, group: Group, visit: Visit) -> dict[str, torch.Tensor]:
        """The tensors of a unit in its slot, by name."""
        queries = keys = visit.task.n_tokens
        if not is_filled(visit.task, self.work):
            queries = visit.task.count_below(self.work.n_queries)
            keys = visit.task.count_below(self.work.n_keys)
        heads = group.kv_stop - group.kv_start
        key = (slot, len(group.entries), heads, queries, keys)
        if key not in self._views:
            rows = {"query": queries, "key": keys}
            self._views[key] = {
                name: self.layout.carve(
                    self.slots[slot], name, len(group.entries), heads, rows[one.axis]
                )
                for name, one in self.layout.fields.items()
            }
        return self._views[key]

    def load_inputs(self, unit: Unit) -> None:
        """Load the rows of all inputs."""
        runs = unit.visit.task.runs
        # Carried rows of some inputs are copied from the previous slot instead.
        new = runs if unit.previous is None else (*unit.visit.fresh, *unit.visit.loaded)
        with self.mover.input_stage(unit.slot):
            for item in self.inputs:
                passed_on = item.field in self.passed_on
                pieces = self._clipped(new if passed_on else runs, item.rows.axis)
                for entry, block in enumerate(self._blocks_of(item.rows, unit.group)):
                    self.mover.load(unit.fields[item.field][entry], block, pieces)

    def load_states(self, unit: Unit, after: int) -> None:
        """Load the rows of states that wait at home, after the last store of slot ``after``."""
        with self.mover.state_stage(unit.slot, after):
            for state in self.states:
                pieces = self._clipped(unit.visit.loaded, state.axis)
                for entry, block in enumerate(self._blocks_of(state.home, unit.group)):
                    self.mover.load(unit.fields[state.field][entry], block, pieces)

    def fill(self, unit: Unit) -> None:
        """Write what fresh rows of states begin with."""
        for state in self.states:
            for piece in self._clipped(unit.visit.fresh, state.axis):
                n = piece.stop - piece.start
                fill = state.fill(unit.group)
                unit.fields[state.field][:, :, piece.local : piece.local + n] = fill

    def fill_up(self, unit: Unit) -> None:
        """Write the rows beyond the end of the sequence, if the task has such (padding.py)."""
        if not is_filled(unit.visit.task, self.work):
            return
        end = unit.visit.task.count_below(self.work.n_tokens)
        for item in self.inputs:
            rows = unit.fields[item.field]
            rows[:, :, end:] = rows[:, :, end - 1 : end] if item.of_scores else 0
        for state in self.states:
            unit.fields[state.field][:, :, end:] = state.fill(unit.group)

    def carry(self, unit: Unit) -> None:
        """Copy carried rows from the previous unit's slot."""
        if unit.previous is None:
            return
        slot, previous = unit.previous
        fields = [(state.field, state.axis) for state in self.states]
        fields += [
            (item.field, item.rows.axis) for item in self.inputs if item.field in self.passed_on
        ]
        for name, axis in fields:
            limit = self._limit(axis)
            for carried in unit.visit.carried:
                piece = carried.rows.within(0, limit)
                if piece is None:
                    continue
                n = piece.stop - piece.start
                there = carried.previous_local
                copy_on_device(
                    unit.fields[name][:, :, piece.local : piece.local + n],
                    previous[name][:, :, there : there + n],
                )
        self.mover.carried_from(slot)

    def finish(self, unit: Unit, *, over_inputs: bool = False) -> None:
        """Write finished rows in their final form; ``over_inputs``: only those with a final field
        (rows that are final in place have been multiplied already)."""
        for state in self.states:
            factor = None
            if self.factor is not None:
                factor = self.factor(unit.group, state.axis)
            current = unit.fields[state.field]
            final = unit.fields.get(state.final_field, current)
            if final is current and (factor is None or over_inputs):
                continue
            for piece in self._clipped(unit.visit.finished, state.axis):
                local = slice(piece.local, piece.local + piece.stop - piece.start)
                if factor is None:
                    final[:, :, local] = current[:, :, local]
                else:
                    torch.mul(current[:, :, local], factor, out=final[:, :, local])

    def store(self, unit: Unit) -> None:
        """Store rows that wait at home, and finished ones."""
        with self.mover.store_stage(unit.slot):
            for state in self.states:
                current = unit.fields[state.field]
                self._put(unit, state.axis, unit.visit.stored, current, state.home)
                finished = unit.fields.get(state.final_field, current)
                self._put(unit, state.axis, unit.visit.finished, finished, state.final)

    def leave(self, group: Group) -> None:
        """Tell the mover that all units of a head group are stored."""
        rows = [item.rows for item in self.inputs] + [state.final for state in self.states]
        self.mover.left(block for each in rows for block in self._blocks_of(each, group))

    def _put(
        self,
        unit: Unit,
        axis: Axis,
        rows: Iterable[Rows],
        source: torch.Tensor,
        target: RowTensor | GroupBuffer,
    ) -> None:
        pieces = self._clipped(rows, axis)
        for entry, block in enumerate(self._blocks_of(target, unit.group)):
            self.mover.store(block, source[entry], pieces)

    def _blocks_of(self, rows: RowTensor | GroupBuffer, group: Group) -> list[torch.Tensor]:
        key = (id(rows), group)
        if key not in self._blocks:
            if len(self._blocks) > _MOST_BLOCKS:
                self._blocks.clear()
            self._blocks[key] = rows.blocks(group)
        return self._blocks[key]

    def _limit(self, axis: Axis) -> int:
        return self.work.n_queries if axis == "query" else self.work.n_keys

    def _clipped(self, rows: Iterable[Rows], axis: Axis) -> list[Rows]:
        limit = self._limit(axis)
        return [part for piece in rows if (part := piece.within(0, limit)) is not None]


def accumulate(
    job: Job, task: TaskTensors, fields: Mapping[str, torch.Tensor], scaling: Scaling
) -> None:
    """Add a task's part to the states in the slots that ``fields`` are of."""

    def tensor(name: str, spec: RowSpec) -> torch.Tensor:
        return fields[name].squeeze(-1) if spec.width == "one" else fields[name]

    given = {item.name: tensor(item.name, item) for item in job.spec.inputs[3:]}
    states = [tensor(f"state_{state.name}", state) for state in job.spec.states]
    job.spec.accumulate(job.call.kernel, task, given, states, scaling)


@contextmanager
def moved_tensors(
    job: Job,
    group: GroupSize,
    home: Residency,
    waiting: Collection[Axis] = ("query", "key"),
    made_at: torch.device | None = None,
) -> Iterator[tuple[tuple[Input, ...], tuple[State, ...], PageLocks]]:
    """The inputs and states of a pass through slots, page-locked where that is worth it.

    Args:
        group: the largest head group.
        home: where states wait between tasks.
        waiting: whose states wait: those of queries, of keys, or of both.
        made_at: where results that are their own state are made; None: where the inputs are.
    """
    call, spec = job.call, job.spec
    given = {id(result) for result in job.results.tensors.values()}
    results = job.results.make(made_at)
    inputs = tuple(
        Input(i.name, RowTensor(_with_columns(job.tensors[i.name], i), i.axis), i.of_scores)
        for i in spec.inputs
    )
    states = []
    for state, result in zip(spec.states, results, strict=True):
        final = RowTensor(_with_columns(result, state), state.axis)
        own = job.results.dtype_of(state) == call.work.state_dtype
        waits = not own and state.axis in waiting
        at = GroupBuffer(_accumulator(job, group, state, home), state.axis) if waits else final
        fill = partial(job.fill, state)
        states.append(State(f"state_{state.name}", f"final_{state.name}", fill, at, final))
    read = [item.rows.tensor for item in inputs]
    as_they_are = [
        tensor
        for tensor, item in zip(read, spec.inputs, strict=True)
        if tensor.dtype == item.dtype(call.work)
    ]
    homes = [state.home.tensor for state in states if isinstance(state.home, GroupBuffer)]
    made = [result for result in results if id(result) not in given]
    there = [result for result in results if id(result) in given]
    moved = [*read, *results, *homes]
    backend = backend_of(call.device)
    with backend.page_locks(moved, made, as_they_are, there, read) as locks:
        yield inputs, tuple(states), locks


@contextmanager
def arena_and_mover(
    job: Job, n_bytes: int, n_slots: int, locks: PageLocks, clock: Clock
) -> Iterator[tuple[torch.Tensor, Mover]]:
    """Memory for slots, and what moves rows into them and out of them.

    At the end, also after a failure, no copy is in flight any more, and the results of units that
    were reported done have arrived.
    """
    backend, device = backend_of(job.call.device), job.call.device
    mover: Mover | None = None
    try:
        arena = backend.allocate(n_bytes, device)
        mover = backend.mover(device, n_slots, locks, clock)
        yield arena, mover
    finally:
        if mover is not None:
            mover.finish(wait=True)
            if job.report is not None:
                job.report.loaded_bytes += mover.loaded_bytes
                job.report.stored_bytes += mover.stored_bytes


def _with_columns(tensor: torch.Tensor, rows: RowSpec) -> torch.Tensor:
    """``tensor`` as (*batch, heads, rows, width); the width is 1 for one number a row."""
    return tensor.unsqueeze(-1) if rows.width == "one" else tensor


def _accumulator(job: Job, group: GroupSize, state: StateSpec, home: Residency) -> torch.Tensor:
    """Memory in which the state of one head group waits between visits: (entries, heads, n, width)
    in the state dtype."""
    work = job.call.work
    shape = (
        group.batch, state.heads(work, group.kv_heads), state.rows(work), state.columns(work),
    )  # fmt: skip
    return home.travelling(shape, work.state_dtype, job.call.device)
