"""Runs units through the slots: load, compute, store, overlapped with the units before and after.

The engine knows rows and slots. What a unit computes is up to the pass (routes/slots.py), how bytes
are copied is up to the mover (device/mover.py), and recovery is up to the runner (runner.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from quorum_attention.decomposition import Rows
from quorum_attention.execution.control.visits import Visit
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.memory import is_out_of_memory
from quorum_attention.execution.padding import is_filled
from quorum_attention.execution.rows import Axis, GroupBuffer, RowTensor
from quorum_attention.execution.slots import SlotLayout
from quorum_attention.execution.workload import Group, Workload
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
        fill: the value of a group's rows before their first visit, or (h, 1, 1), one for each head.
        home: where rows are stored between visits.
        final: where finished rows are stored; the home itself if the result has the state's dtype.
        final_field: the slot's field for finished rows in the result's dtype; None if that is the
            state's dtype.
    """

    field: str
    fill: Callable[[Group], float | torch.Tensor]
    home: RowTensor | GroupBuffer
    final: RowTensor
    final_field: str | None

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
    previous: tuple[int, dict[str, torch.Tensor]] | None

    def from_home(self) -> Unit:
        """The same unit with its carried rows loaded instead, to run it again."""
        carried = tuple(piece.rows for piece in self.visit.carried)
        visit = replace(self.visit, loaded=(*self.visit.loaded, *carried), carried=())
        return replace(self, visit=visit, previous=None)


@dataclass(frozen=True, slots=True)
class SlotPass:
    """A pass as the engine runs it: what is loaded, what accumulates, how a unit is computed.

    Attributes:
        work: the call's sizes.
        layout: of the slots.
        inputs: the tensors that are read.
        states: the tensors that accumulate.
        compute: computes a loaded unit.
        prepare: changes a unit's freshly loaded inputs before ``compute``.
        spoiled: says of a computed unit whether its results are unusable. None: they never are, and
            the host never waits to ask.
        repeats: given a spoiled unit whose inputs are in the slot unchanged, says whether to run it
            again from the state before it. False leaves its results as they are.
        passed_on: inputs whose shared rows may be copied from the previous slot.
        factor: the factor of a group's finished rows, of queries or of keys: (entries, heads, 1, 1)
            in the state's dtype; None is 1.
    """

    work: Workload
    layout: SlotLayout
    inputs: tuple[Input, ...]
    states: tuple[State, ...]
    compute: Callable[[Unit], None]
    prepare: Callable[[Unit], None] | None = None
    spoiled: Callable[[Unit], bool] | None = None
    repeats: Callable[[Unit], bool] | None = None
    passed_on: frozenset[str] = frozenset()
    factor: Callable[[Group, Axis], torch.Tensor | None] | None = None


class StoringError(RuntimeError):
    """Results of a unit are stored in part: to compute it again would add that part twice. So it is
    not recovered from, as running out of memory is elsewhere."""


class Engine:
    """Runs units in order in ``n_cap`` slots that are carved from one arena (uint8)."""

    def __init__(
        self, pass_: SlotPass, arena: torch.Tensor, n_cap: int, mover: Mover, clock: Clock
    ) -> None:
        size = pass_.layout.slot_bytes
        self.pass_ = pass_
        self.mover = mover
        self.clock = clock
        self.slots = [arena[i * size : (i + 1) * size] for i in range(n_cap)]
        self._views: dict[tuple[int, int, int, int, int], dict[str, torch.Tensor]] = {}
        # By identity of the row tensor: the pass holds these, so no id is used twice.
        self._blocks: dict[tuple[int, Group], list[torch.Tensor]] = {}
        self._stored_last: Group | None = None

    def run(self, turns: Iterable[tuple[Group, Visit]], done: Callable[[Unit], None]) -> None:
        """Run ``turns`` in order; ``done`` is called once the copies of a unit's results are
        issued."""
        overlapped = len(self.slots) > 1
        # A unit is settled one unit late if the host has to look at its flags, so that the device
        # computes the next one meanwhile.
        lag = 1 if overlapped and self.pass_.spoiled is not None else 0
        ahead = max(1, len(self.slots) - 1)
        waiting: deque[Unit] = deque()
        computed: deque[Unit] = deque()
        source = self._units(turns)

        def fetch(count: int) -> None:
            while len(waiting) < count:
                unit = next(source, None)
                if unit is None:
                    break
                self._load_inputs(unit)
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
            self._store(unit)
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
            self._leave(self._stored_last)
        self._stored_last = unit.group

    def _leave(self, group: Group) -> None:
        """Tell the mover that all units of a head group are stored."""
        rows = [item.rows for item in self.pass_.inputs]
        rows += [state.final for state in self.pass_.states]
        self.mover.left(block for each in rows for block in self._blocks_of(each, group))

    def _repeat(self, unit: Unit) -> bool:
        """Run a spoiled unit again for as long as that helps; returns whether it was run again."""
        assert self.pass_.spoiled is not None
        assert self.pass_.repeats is not None
        whole, changed = unit.from_home(), False
        while self.pass_.spoiled(unit):
            # Finished rows may have overwritten the inputs.
            self.mover.finish(wait=True)
            self._load_inputs(whole)
            self.mover.finish(wait=True)
            self._fill_up(whole)
            if not self.pass_.repeats(whole):
                with self.mover.compute_stage(unit.slot):
                    self._finish(unit, over_inputs=True)
                self.mover.wait_computed(unit.slot)
                break
            self._load_state(whole)
            self._compute(whole)
            self.mover.wait_computed(unit.slot)
            changed = True
        return changed

    def _run_again(self, unit: Unit) -> None:
        self.mover.finish(wait=True)
        self._load_inputs(unit)
        self._load_state(unit)
        self._compute(unit)
        self.mover.wait_computed(unit.slot)

    def _units(self, turns: Iterable[tuple[Group, Visit]]) -> Iterator[Unit]:
        previous: Unit | None = None
        for index, (group, visit) in enumerate(turns):
            slot = index % len(self.slots)
            before = None
            if previous is not None and previous.group == group and visit.carried:
                before = (previous.slot, previous.fields)
            unit = Unit(group, visit, slot, self._fields(slot, group, visit), before)
            yield unit
            previous = unit

    def _fields(self, slot: int, group: Group, visit: Visit) -> dict[str, torch.Tensor]:
        work, layout = self.pass_.work, self.pass_.layout
        queries = keys = visit.task.n_tokens
        if not is_filled(visit.task, work):
            queries = visit.task.count_below(work.n_queries)
            keys = visit.task.count_below(work.n_keys)
        heads = group.kv_stop - group.kv_start
        key = (slot, len(group.entries), heads, queries, keys)
        if key not in self._views:
            rows = {"query": queries, "key": keys}
            self._views[key] = {
                name: layout.carve(
                    self.slots[slot], name, len(group.entries), heads, rows[field.axis]
                )
                for name, field in layout.fields.items()
            }
        return self._views[key]

    def _blocks_of(self, rows: RowTensor | GroupBuffer, group: Group) -> list[torch.Tensor]:
        key = (id(rows), group)
        if key not in self._blocks:
            if len(self._blocks) > _MOST_BLOCKS:
                self._blocks.clear()
            self._blocks[key] = rows.blocks(group)
        return self._blocks[key]

    def _limit(self, axis: Axis) -> int:
        return self.pass_.work.n_queries if axis == "query" else self.pass_.work.n_keys

    def _clipped(self, rows: Iterable[Rows], axis: Axis) -> list[Rows]:
        limit = self._limit(axis)
        return [part for piece in rows if (part := piece.within(0, limit)) is not None]

    def _load_inputs(self, unit: Unit) -> None:
        runs = unit.visit.task.runs
        # Carried rows of some inputs are copied from the previous slot instead.
        new = runs if unit.previous is None else (*unit.visit.fresh, *unit.visit.loaded)
        with self.mover.input_stage(unit.slot):
            for item in self.pass_.inputs:
                passed_on = item.field in self.pass_.passed_on
                pieces = self._clipped(new if passed_on else runs, item.rows.axis)
                for entry, block in enumerate(self._blocks_of(item.rows, unit.group)):
                    self.mover.load(unit.fields[item.field][entry], block, pieces)

    def _load_state(self, unit: Unit) -> None:
        # With two slots or more, rows of the unit just before are carried, not loaded. All other
        # rows were last stored by the unit before that one, or earlier.
        n_slots = len(self.slots)
        after = (unit.slot - min(2, n_slots)) % n_slots
        with self.mover.state_stage(unit.slot, after):
            for state in self.pass_.states:
                pieces = self._clipped(unit.visit.loaded, state.axis)
                for entry, block in enumerate(self._blocks_of(state.home, unit.group)):
                    self.mover.load(unit.fields[state.field][entry], block, pieces)

    def _compute(self, unit: Unit) -> None:
        with self.mover.compute_stage(unit.slot):
            with self.clock.timed("gather"):
                for state in self.pass_.states:
                    for piece in self._clipped(unit.visit.fresh, state.axis):
                        n = piece.stop - piece.start
                        fill = state.fill(unit.group)
                        unit.fields[state.field][:, :, piece.local : piece.local + n] = fill
                if unit.previous is not None:
                    self._carry(unit, *unit.previous)
                self._fill_up(unit)
                if self.pass_.prepare is not None:
                    self.pass_.prepare(unit)
            with self.clock.timed("compute"):
                self.pass_.compute(unit)
            with self.clock.timed("scatter"):
                self._finish(unit)

    def _fill_up(self, unit: Unit) -> None:
        """Write the rows beyond the end of the sequence, if the task has such (padding.py)."""
        if not is_filled(unit.visit.task, self.pass_.work):
            return
        end = unit.visit.task.count_below(self.pass_.work.n_tokens)
        for item in self.pass_.inputs:
            field = unit.fields[item.field]
            field[:, :, end:] = field[:, :, end - 1 : end] if item.of_scores else 0
        for state in self.pass_.states:
            unit.fields[state.field][:, :, end:] = state.fill(unit.group)

    def _finish(self, unit: Unit, *, over_inputs: bool = False) -> None:
        """Write finished rows in their final form; ``over_inputs``: only those with a final field
        (rows that are final in place have been multiplied already)."""
        for state in self.pass_.states:
            factor = None
            if self.pass_.factor is not None:
                factor = self.pass_.factor(unit.group, state.axis)
            if state.final_field is None and (factor is None or over_inputs):
                continue
            current = unit.fields[state.field]
            final = unit.fields[state.final_field] if state.final_field else current
            for piece in self._clipped(unit.visit.finished, state.axis):
                local = slice(piece.local, piece.local + piece.stop - piece.start)
                if factor is None:
                    final[:, :, local] = current[:, :, local]
                else:
                    torch.mul(current[:, :, local], factor, out=final[:, :, local])

    def _carry(self, unit: Unit, slot: int, previous: dict[str, torch.Tensor]) -> None:
        fields = [(state.field, state.axis) for state in self.pass_.states]
        fields += [
            (item.field, item.rows.axis)
            for item in self.pass_.inputs
            if item.field in self.pass_.passed_on
        ]
        for field, axis in fields:
            limit = self._limit(axis)
            for carried in unit.visit.carried:
                piece = carried.rows.within(0, limit)
                if piece is None:
                    continue
                n = piece.stop - piece.start
                there = carried.previous_local
                copy_on_device(
                    unit.fields[field][:, :, piece.local : piece.local + n],
                    previous[field][:, :, there : there + n],
                )
        self.mover.carried_from(slot)

    def _store(self, unit: Unit) -> None:
        with self.mover.store_stage(unit.slot):
            for state in self.pass_.states:
                current = unit.fields[state.field]
                self._put(unit, state.axis, unit.visit.stored, current, state.home)
                finished = unit.fields[state.final_field] if state.final_field else current
                self._put(unit, state.axis, unit.visit.finished, finished, state.final)

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
