"""Runs units through slots: load, compute, store, overlapped with the units before and after.

A unit has all its rows in its slot, or its rows stream by others that stay in a slot of their own
(``Beside``). How bytes are copied is up to the mover (device/mover.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import torch

from quorum_attention.decomposition import Rectangle, Rows, Task
from quorum_attention.errors import is_out_of_memory
from quorum_attention.execution.call import Job, Tools
from quorum_attention.execution.control.visits import Visit
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.mover import Clock, Mover
from quorum_attention.execution.device.page_locks import Copied, PageLocks
from quorum_attention.execution.device.residency import travelling
from quorum_attention.execution.problem import Axis, Group, GroupSize, PassSpec, RowSpec, StateSpec
from quorum_attention.execution.scaling import BackwardScaling
from quorum_attention.kernels.protocol import CallShape
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.tensors import copy_on_device

ALIGNMENT = 256


class LayoutError(RuntimeError):
    """Fields of a slot would overlap: an error in this library, never in the caller's code."""


def aligned(n_bytes: int) -> int:
    """``n_bytes`` rounded up to the alignment of a slot's fields."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a slot: (entries, heads, rows, width) of ``dtype``.

    Attributes:
        offset: in bytes from the slot's start.
        n_bytes: for the most entries, heads and rows.
        over: the input whose memory it uses: a finished result overwrites rows of that input, which
            must not be read any more. None: it has memory of its own.
    """

    name: str
    axis: Axis
    width: int
    dtype: torch.dtype
    offset: int
    n_bytes: int
    over: str | None = None

    @property
    def stop(self) -> int:
        """Where the next field may begin."""
        return self.offset + aligned(self.n_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one head."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layout of a slot.

    Attributes:
        fields: by name.
        slot_bytes: bytes of one slot.
        shared: query heads that share a key/value head.

    Raises:
        LayoutError: a field reaches out of the slot, or overlaps another that it is not ``over``.
    """

    fields: dict[str, Field]
    slot_bytes: int
    shared: int

    def __post_init__(self) -> None:
        placed = sorted(self.fields.values(), key=lambda field: field.offset)
        # A finished result lies in the memory of its input.
        apart = [field for field in placed if field.over is None]
        over = [(self.fields[field.over], field) for field in placed if field.over is not None]
        wrong = [
            *(f for f in placed if f.offset % ALIGNMENT or f.offset < 0),
            *(f for f in placed if f.stop > self.slot_bytes),
            *(after for before, after in pairwise(apart) if before.stop > after.offset),
            *(f for under, f in over if f.offset != under.offset or f.stop > under.stop),
        ]
        if wrong:
            raise LayoutError(f"field {wrong[0].name!r} does not lie where it may: {placed}")

    def keeps(self, name: str) -> bool:
        """Whether rows of the input ``name`` survive when *other* rows are finished.

        They do, unless a finished result with rows of another size is written over the input.
        """
        field = self.fields[name]
        return all(
            other.row_bytes == field.row_bytes
            for other in self.fields.values()
            if other.over == name
        )

    def carve(
        self, slot: torch.Tensor, name: str, entries: int, kv_heads: int, rows: int
    ) -> torch.Tensor:
        """The field ``name`` of a slot (uint8) as a dense (entries, heads, rows, width).

        It is dense for the given sizes, so that a kernel always gets contiguous rows.

        Raises:
            LayoutError: the field is too small for the given sizes.
        """
        field = self.fields[name]
        heads = kv_heads * (self.shared if field.axis == "query" else 1)
        n_bytes = entries * heads * rows * field.row_bytes
        if n_bytes > field.n_bytes:
            raise LayoutError(f"field {name!r} has {field.n_bytes} bytes of {n_bytes}")
        flat = slot[field.offset : field.offset + n_bytes].view(field.dtype)
        return flat.view(entries, heads, rows, field.width)


# The planner's search asks for the same layout with every number of slots.
@lru_cache(maxsize=64)
def slot_layout(
    spec: PassSpec,
    work: CallShape,
    group: GroupSize,
    rows: tuple[int, int],
    result_dtype: torch.dtype,
    *,
    axis: Axis | None = None,
) -> SlotLayout:
    """The slot of a task: inputs, states, and finished rows if the results have another dtype.

    Finished rows overwrite an input that is no longer needed. To run a task again, its inputs have
    to be loaded again.

    Args:
        rows: most queries and keys of a task (``Schedule.task_rows``).
        axis: leave out what is not of this side, queries or keys; None: have both.
    """
    most = {"query": rows[0], "key": rows[1]}
    fields: dict[str, Field] = {}
    end = 0

    def add(name: str, rows: RowSpec, dtype: torch.dtype, over: str | None = None) -> None:
        """A field, if it is of this side; over an input if it fits there."""
        nonlocal end
        if axis not in (None, rows.axis):
            return
        n_bytes, at = rows.count(work, group, most[rows.axis]) * dtype.itemsize, end
        if over is not None and aligned(n_bytes) <= aligned(fields[over].n_bytes):
            at = fields[over].offset
        else:
            over, end = None, end + aligned(n_bytes)
        fields[name] = Field(name, rows.axis, rows.columns(work), dtype, at, n_bytes, over)

    for item in spec.inputs:
        add(item.name, item, item.dtype(work))
    for state in spec.states:
        add(f"state_{state.name}", state, work.state_dtype)
    for state in spec.states:
        if result_dtype != work.state_dtype and state.over is not None:
            add(f"final_{state.name}", state, result_dtype, state.over)
    return SlotLayout(fields, end, work.queries_per_key_head)


# Most lists of views that are remembered: enough for a few head groups.
_MOST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A tensor whose rows and heads are those of queries or of keys, as ``spec`` says.

    It is (*batch, heads, n, width); or, ``of_group``, (entries, heads, n, width): memory for the
    state of one head group, used by one group after another.
    """

    tensor: torch.Tensor
    spec: RowSpec
    of_group: bool = False

    def blocks(self, group: Group) -> list[torch.Tensor]:
        """The group's part: a view (heads, n, width) for each batch entry."""
        heads = group.query_heads if self.spec.axis == "query" else group.key_heads
        if self.of_group:
            count = heads.stop - heads.start
            return [self.tensor[entry, :count] for entry in range(len(group.entries))]
        return [self.tensor[entry][heads] for entry in group.entries]


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that accumulates row by row over the tasks.

    Attributes:
        home: where rows are stored between visits.
        final: where finished rows are stored; the home itself if the result has the state's dtype.
    """

    spec: StateSpec
    home: RowTensor
    final: RowTensor

    @property
    def field(self) -> str:
        """Its field in the slot."""
        return f"state_{self.spec.name}"

    @property
    def final_field(self) -> str:
        """The field for finished rows in the result's dtype; slots have none if that is the
        state's."""
        return f"final_{self.spec.name}"


@dataclass(frozen=True, slots=True)
class Unit:
    """One visit of one head group, in one slot.

    Attributes:
        fields: the slot's tensors by name, (entries, heads, rows, width).
        after: states are loaded after the last store of this slot.
        previous: the slot that its carried rows are copied from, and that slot's fields; None if it
            carries none.
        beside: the rows that stay while this unit's stream by; None: the unit has all its rows.
    """

    group: Group
    visit: Visit
    slot: int
    fields: dict[str, torch.Tensor]
    after: int
    previous: tuple[int, dict[str, torch.Tensor]] | None = None
    beside: Beside | None = None

    def from_home(self) -> Unit:
        """The same unit with its carried rows loaded instead, to run it again."""
        carried = tuple(piece.rows for piece in self.visit.carried)
        visit = replace(self.visit, loaded=(*self.visit.loaded, *carried), carried=())
        return replace(self, visit=visit, previous=None)


@dataclass(frozen=True, slots=True)
class Beside:
    """What stays in a slot of its own while a unit streams by.

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
    """

    def __init__(
        self,
        job: Job,
        layout: SlotLayout,
        moved: Moved,
        slots: dict[int, torch.Tensor],
        mover: Mover,
    ) -> None:
        self._job, self._work, self._layout = job, job.work, layout
        self.slots, self.mover = slots, mover
        # One side's slots have no fields for the rows of the other.
        self._inputs = [item for item in moved.inputs if item.spec.name in layout.fields]
        self._states = [state for state in moved.states if state.field in layout.fields]
        # Inputs whose shared rows may be copied from the previous slot.
        divided = job.spec.divided if job.problem.scaled else None
        names = [item.spec.name for item in self._inputs]
        self._passed_on = [n for n in names if n != divided and layout.keeps(n)]
        # By slot, entries, heads, queries and keys.
        self._views: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        # By identity of the row tensor: these are held here, so no id is used twice.
        self._blocks: dict[tuple[int, Group], list[torch.Tensor]] = {}

    def fields(self, slot: int, group: Group, visit: Visit) -> dict[str, torch.Tensor]:
        """The tensors of a unit in its slot, by name."""
        queries = visit.task.count_below(self._work.n_queries)
        keys = visit.task.count_below(self._work.n_keys)
        heads = group.kv_stop - group.kv_start
        key = (slot, len(group.entries), heads, queries, keys)
        if key not in self._views:
            rows = {"query": queries, "key": keys}
            self._views[key] = {
                name: self._layout.carve(
                    self.slots[slot], name, len(group.entries), heads, rows[one.axis]
                )
                for name, one in self._layout.fields.items()
            }
        return self._views[key]

    def load_inputs(self, unit: Unit) -> None:
        """Load the rows of all inputs."""
        runs = unit.visit.task.runs
        # Carried rows of some inputs are copied from the previous slot instead.
        new = runs if unit.previous is None else (*unit.visit.fresh, *unit.visit.loaded)
        with self.mover.input_stage(unit.slot):
            for item in self._inputs:
                name = item.spec.name
                rows = new if name in self._passed_on else runs
                self._move(self.mover.load, unit, unit.fields[name], rows, item)

    def load_states(self, unit: Unit) -> None:
        """Load the rows of states that wait at home."""
        with self.mover.state_stage(unit.slot, unit.after):
            for state in self._states:
                current = unit.fields[state.field]
                self._move(self.mover.load, unit, current, unit.visit.loaded, state.home)

    def fill(self, unit: Unit) -> None:
        """Write what fresh rows of states begin with."""
        for state in self._states:
            for piece in self._clipped(unit.visit.fresh, state.spec.axis):
                n = piece.stop - piece.start
                fill = self._job.fill(state.spec, unit.group)
                unit.fields[state.field][:, :, piece.local : piece.local + n] = fill

    def carry(self, unit: Unit) -> None:
        """Copy carried rows from the previous unit's slot."""
        if unit.previous is None:
            return
        slot, previous = unit.previous
        for name in [*(state.field for state in self._states), *self._passed_on]:
            limit = self._limit(self._layout.fields[name].axis)
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
        for state in self._states:
            factor = self._job.factor(unit.group, state.spec.axis)
            current = unit.fields[state.field]
            final = unit.fields.get(state.final_field, current)
            if final is current and (factor is None or over_inputs):
                continue
            for piece in self._clipped(unit.visit.finished, state.spec.axis):
                local = slice(piece.local, piece.local + piece.stop - piece.start)
                if factor is None:
                    final[:, :, local] = current[:, :, local]
                else:
                    torch.mul(current[:, :, local], factor, out=final[:, :, local])

    def store(self, unit: Unit) -> None:
        """Store rows that wait at home, and finished ones."""
        with self.mover.store_stage(unit.slot):
            for state in self._states:
                current = unit.fields[state.field]
                self._move(self.mover.store, unit, current, unit.visit.stored, state.home)
                finished = unit.fields.get(state.final_field, current)
                self._move(self.mover.store, unit, finished, unit.visit.finished, state.final)

    def release(self, group: Group) -> None:
        """Tell the mover that all units of a head group are stored."""
        rows = [*self._inputs, *(state.final for state in self._states)]
        self.mover.release(block for each in rows for block in self._blocks_of(each, group))

    def _move(
        self, move: Move, unit: Unit, field: torch.Tensor, rows: Iterable[Rows], far: RowTensor
    ) -> None:
        pieces = self._clipped(rows, far.spec.axis)
        for part, block in zip(field, self._blocks_of(far, unit.group), strict=True):
            move(part, block, pieces)

    def _blocks_of(self, rows: RowTensor, group: Group) -> list[torch.Tensor]:
        key = (id(rows), group)
        if key not in self._blocks:
            if len(self._blocks) > _MOST_BLOCKS:
                self._blocks.clear()
            self._blocks[key] = rows.blocks(group)
        return self._blocks[key]

    def _limit(self, axis: Axis) -> int:
        return self._work.n_queries if axis == "query" else self._work.n_keys

    def _clipped(self, rows: Iterable[Rows], axis: Axis) -> list[Rows]:
        limit = self._limit(axis)
        return [part for piece in rows if (part := piece.within(0, limit)) is not None]


@dataclass(frozen=True, slots=True)
class Moved:
    """The inputs and states of a pass through slots, and their page locks."""

    inputs: tuple[RowTensor, ...]
    states: tuple[State, ...]
    locks: PageLocks


@contextmanager
def moved_tensors(
    job: Job,
    group: GroupSize,
    home: torch.device,
    waiting: Collection[Axis] = ("query", "key"),
    made_at: torch.device | None = None,
) -> Iterator[Moved]:
    """What a pass through slots moves, page-locked where that is worth it.

    Args:
        group: the largest head group.
        home: where states wait between tasks.
        waiting: whose states wait: those of queries, of keys, or of both.
        made_at: where results that are their own state are made; None: where the inputs are.
    """
    spec, work = job.spec, job.work
    given = {id(result) for result in job.results.values()}
    results = job.make_results(made_at)
    inputs, states, copied = [], [], []
    for item in spec.inputs:
        tensor = _with_columns(job.tensors[item.name], item)
        inputs.append(RowTensor(tensor, item))
        as_it_is = tensor.dtype == item.dtype(work)
        copied.append(Copied(tensor, by_address=as_it_is, only_read=True))
    for state, result in zip(spec.states, results, strict=True):
        at = final = RowTensor(_with_columns(result, state), state)
        copied.append(Copied(result, is_result=True, fresh=id(result) not in given))
        if job.dtype_of(state) != work.state_dtype and state.axis in waiting:
            heads = state.heads(work, group.kv_heads)
            shape = group.batch, heads, state.rows(work), state.columns(work)
            tensor = travelling(shape, work.state_dtype, home, job.device)
            at = RowTensor(tensor, state, of_group=True)
            copied.append(Copied(tensor))
        states.append(State(state, at, final))
    with backend_of(job.device).page_locks(copied) as locks:
        yield Moved(tuple(inputs), tuple(states), locks)


@contextmanager
def open_slots(
    job: Job, moved: Moved, clock: Clock, *layouts: tuple[SlotLayout, int]
) -> Iterator[list[SlotRows]]:
    """What moves rows into slots and out of them, for each layout and how many slots it has: all of
    one arena and one mover.

    At the end, also after a failure, no copy is in flight any more, and the results of units that
    were reported done have arrived.
    """
    backend, device = backend_of(job.device), job.device
    arena = backend.allocate(sum(layout.slot_bytes * n for layout, n in layouts), device)
    mover = backend.mover(device, sum(n for _, n in layouts), moved.locks, clock)
    try:
        sides, first, start = [], 0, 0
        for layout, n in layouts:
            size = layout.slot_bytes
            slots = {first + k: arena[start + k * size :][:size] for k in range(n)}
            first, start = first + n, start + n * size
            sides.append(SlotRows(job, layout, moved, slots, mover))
        yield sides
    finally:
        mover.finish(wait=True)
        if job.report is not None:
            job.report.loaded_bytes += mover.loaded_bytes
            job.report.stored_bytes += mover.stored_bytes


def _with_columns(tensor: torch.Tensor, rows: RowSpec) -> torch.Tensor:
    """``tensor`` as (*batch, heads, rows, width); the width is 1 for one number a row."""
    return tensor.unsqueeze(-1) if rows.width == "one" else tensor


# --- The engine -----------------------------------------------------------------------------------


class StoringError(RuntimeError):
    """Results of a unit are stored in part: to compute it again would add that part twice. So it is
    not recovered from, as running out of memory is elsewhere."""


@dataclass(slots=True)
class Engine:
    """Runs units in order.

    Attributes:
        limits: most queries and keys of a rectangle.
        rows: moves the rows of units.
        scaling: scales a backward; None: it is not scaled.
        staying: moves the rows that stay; None: none do.
    """

    job: Job
    tools: Tools
    limits: tuple[int, int]
    rows: SlotRows
    scaling: BackwardScaling | None = None
    staying: SlotRows | None = None
    _stored_last: Group | None = field(default=None, init=False)

    def run(self, units: Iterable[Unit]) -> Iterator[Unit]:
        """Run ``units`` in order; yields each once the copies of its results are issued."""
        n_slots = len(self.rows.slots)
        # A unit is settled one unit late if the host has to look at its flags, so that the device
        # computes the next one meanwhile.
        by_unit = self.scaling is not None and self.scaling.by_unit
        lag = 1 if n_slots > 1 and by_unit else 0
        # What stays is loaded with its first unit: not before the last unit beside what stayed
        # before.
        ahead = 1 if self.staying is not None else max(1, n_slots - 1)
        waiting: deque[Unit] = deque()
        computed: deque[Unit] = deque()
        source = iter(units)

        def fetch(count: int) -> None:
            while len(waiting) < count:
                unit = next(source, None)
                if unit is None:
                    break
                self._load_inputs(unit)
                waiting.append(unit)
            if waiting:
                self.rows.load_states(waiting[0])

        try:
            fetch(1)
            while waiting:
                unit = waiting.popleft()
                self._compute(unit)
                computed.append(unit)
                while len(computed) > lag:
                    yield self._settle(computed)
                fetch(ahead)
            while computed:
                yield self._settle(computed)
        except Exception as error:
            if is_out_of_memory(error):
                # Units that were computed before the failure stay done.
                while computed:
                    yield self._settle(computed)
            raise

    def _settle(self, computed: deque[Unit]) -> Unit:
        """Store the first unit of ``computed``; if it overflowed, repeat it first."""
        if self.scaling is not None and self.scaling.by_unit:
            slot = computed[0].slot
            self.rows.mover.wait_computed(slot)
            if self.scaling.overflowed(slot):
                # If this fails, none of them counts as computed.
                first, *followers = computed
                computed.clear()
                if self._repeat(first, self.scaling):
                    for follower in followers:
                        self._reload(follower)
                        self._run_again(follower)
                computed.extend((first, *followers))
            self.scaling.begin(slot)
        unit = computed.popleft()
        try:
            self._store(unit)
        except Exception as error:
            # What streams by begins anew with its head group.
            if is_out_of_memory(error) and self.staying is None:
                raise StoringError(
                    "memory ran out while a unit's results were copied out of its slot, so it is "
                    f"not known which of them arrived: {error}"
                ) from error
            raise
        # Units come group by group.
        if self._stored_last is not None and unit.group != self._stored_last:
            for rows in filter(None, (self.rows, self.staying)):
                rows.release(self._stored_last)
        self._stored_last = unit.group
        return unit

    def _repeat(self, unit: Unit, scaling: BackwardScaling) -> bool:
        """Run a unit that overflowed again for as long as that helps; returns whether it did."""
        whole, again = unit.from_home(), 0

        def read() -> dict[str, torch.Tensor]:
            # Finished rows may have overwritten the inputs.
            self._reload(whole)
            self.rows.mover.finish(wait=True)
            return whole.fields

        for again in scaling.runs(read, unit.slot):
            if again:
                self.job.repeated(1)
                self._run_again(whole)
        if scaling.overflowed(unit.slot):
            with self.rows.mover.compute_stage(unit.slot):
                self.rows.finish(unit, over_inputs=True)
            self.rows.mover.wait_computed(unit.slot)
        return again > 0

    def _reload(self, unit: Unit) -> None:
        self.rows.mover.finish(wait=True)
        self.rows.load_inputs(unit)

    def _run_again(self, unit: Unit) -> None:
        self.rows.load_states(unit)
        self._compute(unit)
        self.rows.mover.wait_computed(unit.slot)

    def _load_inputs(self, unit: Unit) -> None:
        beside = unit.beside
        if self.staying is not None and beside is not None and beside.opens:
            self.staying.load_inputs(beside.unit)
            self.staying.load_states(beside.unit)
            with self.rows.mover.compute_stage(beside.unit.slot), self.tools.clock.timed("gather"):
                self.staying.fill(beside.unit)
        self.rows.load_inputs(unit)

    def _compute(self, unit: Unit) -> None:
        with self.rows.mover.compute_stage(unit.slot):
            with self.tools.clock.timed("gather"):
                self.rows.fill(unit)
                self.rows.carry(unit)
                scaling = self.scaling if _has_pairs(unit) else None
                scaled = Scaling() if scaling is None else self._divide(unit, scaling)
            with self.tools.clock.timed("compute"):
                if _has_pairs(unit):
                    self._accumulate(unit, scaled)
                if scaling is not None:
                    scaling.computed(unit.slot)
            with self.tools.clock.timed("scatter"):
                self.rows.finish(unit)

    def _divide(self, unit: Unit, scaling: BackwardScaling) -> Scaling:
        """Divide a unit's upstream gradient in its slot."""
        values = unit if unit.beside is None else unit.beside.unit
        return scaling.divide_(unit.fields["grad_out"], values.fields["value"], unit.slot)

    def _store(self, unit: Unit) -> None:
        self.rows.store(unit)
        beside = unit.beside
        if self.staying is not None and beside is not None and beside.closes:
            with self.rows.mover.compute_stage(beside.unit.slot), self.tools.clock.timed("scatter"):
                self.staying.finish(beside.unit)
            self.staying.store(beside.unit)

    def _accumulate(self, unit: Unit, scaling: Scaling) -> None:
        """Add the pairs of a unit to the states in its slot, and in that of what stays."""
        job, work, kernel = self.job, self.job.work, self.job.kernel
        if unit.beside is not None:
            task, rectangles = unit.beside.task, unit.beside.rectangles
            fields = {**unit.beside.unit.fields, **unit.fields}
        else:
            task, fields = unit.visit.task, unit.fields
            sizes = work.n_queries, work.n_keys
            rectangles = task.rectangles(work.is_causal, *sizes, *self.limits)

        def tensor(name: str, spec: RowSpec) -> torch.Tensor:
            return fields[name].squeeze(-1) if spec.width == "one" else fields[name]

        three = (fields["query"], fields["key"], fields["value"])
        tensors = job.task(self.limits, unit.group, self.tools, task, rectangles, three)
        given = {item.name: tensor(item.name, item) for item in job.spec.inputs[3:]}
        states = [tensor(f"state_{state.name}", state) for state in job.spec.states]
        job.spec.accumulate(kernel, tensors, given, states, scaling)


def _has_pairs(unit: Unit) -> bool:
    """Whether anything meets the rows that stay."""
    return unit.beside is None or bool(unit.beside.rectangles)
