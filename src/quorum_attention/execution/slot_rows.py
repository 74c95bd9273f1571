"""The rows of a unit, moved between its slot and the tensors outside.

How bytes are copied is up to the mover (device/mover.py). Which rows are loaded,
carried, finished and stored, the unit's visit says (control/visits.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

import torch

from quorum_attention.decomposition import Rectangle, Rows, Task
from quorum_attention.execution.control.visits import Carried, Visit
from quorum_attention.execution.device.allocate import empty_accumulator
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import Copied, PageLocks
from quorum_attention.execution.head_groups import Axis, Group, GroupSize
from quorum_attention.execution.job import PassJob
from quorum_attention.execution.pass_spec import GRAD_OUT, RowSpec, StateSpec
from quorum_attention.execution.slot_layout import SlotLayout
from quorum_attention.kernels.device_copies import copy_on_device
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.kernels.torch_private import capturing

# Most lists of views that are remembered: enough for a few head groups.
_MOST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A tensor whose rows and heads are those of queries or of keys, as ``spec`` says.

    It is (*batch, heads, n, width); or, ``of_group``, (entries, heads, n, width):
    memory for the state of one head group, used by one group after another.
    """

    tensor: torch.Tensor
    spec: RowSpec
    of_group: bool = False

    def blocks(self, group: Group) -> list[torch.Tensor]:
        """The group's part in order: a view (*box, heads, n, width) for each box of
        batch entries."""
        heads = group.heads(self.spec.axis)
        if not self.of_group:
            boxes = [self.tensor[box] for box in group.boxes]
            return [box[..., heads, :, :] for box in boxes]
        n_heads = heads.stop - heads.start
        part = self.tensor[: group.n_entries, :n_heads]
        return [part]


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that accumulates row by row over the tasks.

    Attributes:
        home: where rows are stored between visits.
        final: where finished rows are stored; the home itself if the result has the
            state's dtype.
    """

    spec: StateSpec
    home: RowTensor
    final: RowTensor

    @property
    def field(self) -> str:
        """The name of its field in the slot."""
        return f"state_{self.spec.name}"

    @property
    def final_field(self) -> str:
        """The field for finished rows in the result's dtype; slots have none if that is
        the state's."""
        return f"final_{self.spec.name}"


@dataclass(frozen=True, slots=True)
class Unit:
    """One visit of one head group, in one slot.

    Attributes:
        fields: the slot's tensors by name, (entries, heads, rows, width).
        after: states are loaded after the last store of this slot.
        previous: the slot that its carried rows are copied from, and that slot's
            fields; None if it carries none.
        staying: the rows that stay while this unit's stream by; None: the unit has all
            its rows.
    """

    group: Group
    visit: Visit
    slot: int
    fields: NamedTensors
    after: int
    previous: tuple[int, NamedTensors] | None = None
    staying: StayingChunk | None = None

    @property
    def has_pairs(self) -> bool:
        """Whether a kernel has anything to compute."""
        return self.staying is None or bool(self.staying.rectangles)

    def from_home(self) -> Unit:
        """The same unit with its carried rows loaded instead, to run it again."""
        carried = [piece.rows for piece in self.visit.carried]
        loaded = (*self.visit.loaded, *carried)
        visit = replace(self.visit, loaded=loaded, carried=())
        return replace(self, visit=visit, previous=None)


@dataclass(frozen=True, slots=True)
class StayingChunk:
    """The rows that stay in a slot of their own while a unit streams by.

    Attributes:
        unit: the rows that stay.
        task: the whole sequence.
        rectangles: the pairs of the rows that stay and those that stream by.
        opens, closes: whether this is the first unit that streams by, and the last.
    """

    unit: Unit
    task: Task
    rectangles: Sequence[Rectangle]
    opens: bool
    closes: bool


# Loads rows into a slot's field from a tensor outside, or stores them there.
Move = Callable[[torch.Tensor, torch.Tensor, Sequence[Rows]], None]


class SlotRows:
    """Moves the rows of units between their slots and the tensors outside.

    Attributes:
        slots: their memory, uint8, by number.
        common: the memory of the fields that all slots have in one place, uint8.
    """

    def __init__(
        self,
        job: PassJob,
        layout: SlotLayout,
        storage: PassStorage,
        slots: dict[int, torch.Tensor],
        common: torch.Tensor,
        mover: Mover,
    ) -> None:
        self._job = job
        self._shape = job.shape
        self._layout = layout
        self.slots = slots
        self.common = common
        self.mover = mover
        # One side's slots have no fields for the rows of the other.
        names = set(layout.fields)
        if layout.common is not None:
            names.update(layout.common.fields)
        self._inputs = [item for item in storage.inputs if item.spec.name in names]
        self._states = [state for state in storage.states if state.field in names]
        # The inputs whose shared rows may be copied from the previous slot. A scaled
        # backward divides one input in its slot, so the rows of that one are loaded
        # anew.
        divided = GRAD_OUT.name if job.problem.scaled else None
        self._passed_on: list[str] = []
        for item in self._inputs:
            name = item.spec.name
            if name != divided and layout.keeps(name):
                self._passed_on.append(name)
        # Fields by slot, entries, heads, queries and keys.
        self._views: dict[tuple[int, ...], NamedTensors] = {}
        # Parts by identity of the row tensor: these are held here, so no id is used
        # twice.
        self._blocks: dict[tuple[int, Group], list[torch.Tensor]] = {}

    def fields(self, slot: int, group: Group, visit: Visit) -> NamedTensors:
        """The tensors of a unit in its slot, by name."""
        n_queries = visit.task.count_below(self._shape.n_queries)
        n_keys = visit.task.count_below(self._shape.n_keys)
        kv_heads = group.kv_stop - group.kv_start
        key = (slot, group.n_entries, kv_heads, n_queries, n_keys)
        if key in self._views:
            return self._views[key]
        places = [(self._layout, self.slots[slot])]
        if self._layout.common is not None:
            places.append((self._layout.common, self.common))
        fields: NamedTensors = {}
        for layout, memory in places:
            for name, field in layout.fields.items():
                n_rows = n_queries if field.axis == "query" else n_keys
                fields[name] = layout.carve(
                    memory,
                    name,
                    group.n_entries,
                    kv_heads,
                    n_rows,
                )
        self._views[key] = fields
        return fields

    def load_inputs(self, unit: Unit) -> None:
        """Load the rows of all inputs."""
        task_rows = unit.visit.task.runs
        # Carried rows of some inputs are copied from the previous slot instead.
        new_rows = task_rows
        if unit.previous is not None:
            new_rows = (*unit.visit.fresh, *unit.visit.loaded)
        with self.mover.input_stage(unit.slot):
            for item in self._inputs:
                name = item.spec.name
                rows = new_rows if name in self._passed_on else task_rows
                self._move(
                    self.mover.load,
                    unit,
                    unit.fields[name],
                    rows,
                    item,
                )

    def load_states(self, unit: Unit) -> None:
        """Load the rows of states that wait at home."""
        with self.mover.state_stage(unit.slot, unit.after):
            for state in self._states:
                current = unit.fields[state.field]
                self._move(
                    self.mover.load,
                    unit,
                    current,
                    unit.visit.loaded,
                    state.home,
                )

    def fill(self, unit: Unit) -> None:
        """Write the initial values of fresh rows of states."""
        for state in self._states:
            fresh = self._existing(unit.visit.fresh, state.spec.axis)
            if not fresh:
                continue
            value = self._job.initial_value(state.spec, unit.group)
            field = unit.fields[state.field]
            for rows in fresh:
                field[:, :, _local(rows)] = value

    def carry(self, unit: Unit) -> None:
        """Copy carried rows from the previous unit's slot."""
        if unit.previous is None:
            return
        previous_slot, previous_fields = unit.previous
        state_names = [state.field for state in self._states]
        for name in [*state_names, *self._passed_on]:
            for carried in unit.visit.carried:
                self._carry_rows(
                    name,
                    unit.fields[name],
                    previous_fields[name],
                    carried,
                )
        self.mover.carried_from(previous_slot)

    def _carry_rows(
        self, name: str, field: torch.Tensor, previous: torch.Tensor, carried: Carried
    ) -> None:
        """Copy the rows of the field ``name`` that the previous task held as well."""
        axis = self._layout.fields[name].axis
        for rows in self._existing([carried.rows], axis):
            source = previous.narrow(2, carried.previous_local, rows.length)
            target = field[:, :, _local(rows)]
            copy_on_device(target, source)

    def finish(self, unit: Unit, *, was_finished: bool = False) -> None:
        """Write finished rows in their final form.

        Args:
            was_finished: whether they have been finished before. Rows that are final in
                place have been multiplied then.
        """
        for state in self._states:
            factor = self._job.finishing_factor(unit.group, state.spec.axis)
            current = unit.fields[state.field]
            final = unit.fields.get(state.final_field, current)
            if final is current and (factor is None or was_finished):
                continue
            for rows in self._existing(unit.visit.finished, state.spec.axis):
                source = current[:, :, _local(rows)]
                target = final[:, :, _local(rows)]
                if factor is None:
                    target.copy_(source)
                else:
                    torch.mul(source, factor, out=target)

    def store(self, unit: Unit) -> None:
        """Store rows that wait at home, and finished ones."""
        visit = unit.visit
        store = self.mover.store
        with self.mover.store_stage(unit.slot):
            for state in self._states:
                current = unit.fields[state.field]
                final = unit.fields.get(state.final_field, current)
                self._move(
                    store,
                    unit,
                    current,
                    visit.stored,
                    state.home,
                )
                self._move(
                    store,
                    unit,
                    final,
                    visit.finished,
                    state.final,
                )

    def release(self, group: Group) -> None:
        """Tell the mover that all units of a head group are stored."""
        results = [state.final for state in self._states]
        blocks: list[torch.Tensor] = []
        for rows in [*self._inputs, *results]:
            blocks += self._blocks_of(rows, group)
        self.mover.release(blocks)

    def _move(
        self,
        move: Move,
        unit: Unit,
        field: torch.Tensor,
        rows: Iterable[Rows],
        outside: RowTensor,
    ) -> None:
        """Load or store rows of one field, all batch entries of a box together."""
        existing = self._existing(rows, outside.spec.axis)
        if not existing:
            return
        blocks = self._blocks_of(outside, unit.group)
        n_entries = [math.prod(block.shape[:-3]) for block in blocks]
        parts = field.split(n_entries)
        for part, block in zip(parts, blocks, strict=True):
            box_sizes = block.shape[:-3]
            box_part = part.view(*box_sizes, *field.shape[1:])
            move(box_part, block, existing)

    def _blocks_of(self, rows: RowTensor, group: Group) -> list[torch.Tensor]:
        """The head group's part of a tensor outside, remembered."""
        key = (id(rows), group)
        if key not in self._blocks:
            if len(self._blocks) > _MOST_BLOCKS:
                self._blocks.clear()
            self._blocks[key] = rows.blocks(group)
        return self._blocks[key]

    def _existing(self, rows: Iterable[Rows], axis: Axis) -> list[Rows]:
        """The rows that this side has: queries and keys may differ in number."""
        limit = self._shape.n_queries if axis == "query" else self._shape.n_keys
        existing: list[Rows] = []
        for piece in rows:
            clipped = piece.within(0, limit)
            if clipped is not None:
                existing.append(clipped)
        return existing


def _local(rows: Rows) -> slice:
    """The positions of rows in their slot."""
    return slice(rows.local, rows.local + rows.length)


@dataclass(frozen=True, slots=True)
class PassStorage:
    """The tensors outside of slots that a pass reads and writes, and their page
    locks."""

    inputs: tuple[RowTensor, ...]
    states: tuple[State, ...]
    locks: PageLocks


@contextmanager
def open_pass_storage(
    job: PassJob,
    group: GroupSize,
    home: torch.device,
    waiting: Collection[Axis] = ("query", "key"),
    result_device: torch.device | None = None,
) -> Iterator[PassStorage]:
    """Give the tensors that a pass through slots moves, page-locked where that is worth
    it.

    Args:
        group: the largest head group.
        home: where states wait between tasks.
        waiting: whose states wait: those of queries, of keys, or of both.
        result_device: where results that are their own state are allocated; None: where
            the inputs are.
    """
    given_results = set(map(id, job.results.values()))
    results = job.make_results(result_device)
    inputs: list[RowTensor] = []
    states: list[State] = []
    copied: list[Copied] = []
    for item in job.spec.inputs:
        tensor = _with_columns(job.tensors[item.name], item)
        inputs.append(RowTensor(tensor, item))
        needs_no_cast = tensor.dtype == item.dtype(job.shape)
        copied.append(Copied(tensor, by_address=needs_no_cast, only_read=True))
    for spec, result in zip(job.spec.states, results, strict=True):
        final = RowTensor(_with_columns(result, spec), spec)
        is_fresh = id(result) not in given_results
        copied.append(Copied(result, is_result=True, fresh=is_fresh))
        if spec.axis in waiting and job.result_dtype(spec) != job.shape.state_dtype:
            state_home = _accumulator(job, spec, group, home)
            copied.append(Copied(state_home.tensor))
        else:
            state_home = final
        states.append(State(spec, state_home, final))
    with backend_of(job.device).page_locks(copied) as locks:
        yield PassStorage(tuple(inputs), tuple(states), locks)


def _accumulator(
    job: PassJob, spec: StateSpec, group: GroupSize, home: torch.device
) -> RowTensor:
    """Memory on ``home`` for the state of one head group."""
    shape = job.shape
    sizes = (
        group.batch,
        spec.n_heads(shape, group.kv_heads),
        spec.n_rows(shape),
        spec.n_columns(shape),
    )
    tensor = empty_accumulator(
        sizes,
        shape.state_dtype,
        home,
        job.device,
    )
    return RowTensor(tensor, spec, of_group=True)


@contextmanager
def open_slots(
    job: PassJob, storage: PassStorage, *layouts: tuple[SlotLayout, int]
) -> Iterator[list[SlotRows]]:
    """Give what moves rows into slots and out of them, for each layout and its number
    of slots.

    All slots are of one arena and one mover. At the end, also after a failure, no copy
    is in flight any more, and the results of units that were reported done have
    arrived.

    Raises:
        NotImplementedError: a CUDA graph is being captured.
    """
    if capturing(job.device):
        raise NotImplementedError(
            "this call goes through slots in device memory, for which the host waits, "
            "and that cannot be captured in a CUDA graph: give kernel='native', "
            "without a budget or a depth, or make the call outside the graph"
        )
    backend = backend_of(job.device)
    sizes: list[int] = []
    n_all_slots = 0
    for layout, n_slots in layouts:
        sizes += [layout.slot_bytes] * n_slots
        sizes.append(layout.bytes_of(0))
        n_all_slots += n_slots
    arena = backend.allocate(sum(sizes), job.device)
    mover = backend.mover(
        job.device,
        n_all_slots,
        storage.locks,
        job.clock,
    )
    try:
        rows_by_layout: list[SlotRows] = []
        numbers = count()
        parts = iter(arena.split(sizes))
        for layout, n_slots in layouts:
            slots = {next(numbers): next(parts) for _ in range(n_slots)}
            common = next(parts)
            rows_by_layout.append(SlotRows(job, layout, storage, slots, common, mover))
        yield rows_by_layout
    finally:
        mover.finish(wait=True)
        if job.report is not None:
            job.report.loaded_bytes += mover.loaded_bytes
            job.report.stored_bytes += mover.stored_bytes


def _with_columns(tensor: torch.Tensor, rows: RowSpec) -> torch.Tensor:
    """``tensor`` as (*batch, heads, rows, width); the width is 1 for one number a
    row."""
    if rows.width == "one":
        return tensor.unsqueeze(-1)
    return tensor
