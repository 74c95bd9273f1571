"""Runs units of work through the slots: load, compute, store, each beside the next.

The engine knows rows and slots; what a unit computes is the pass's business (forward.py,
backward.py), how bytes move the mover's (transfers.py), what to do about failures the runner's
(runner.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from quorum_attention.execution.rows import Axis, GroupBuffer, RowTensor
from quorum_attention.execution.slots import SlotLayout
from quorum_attention.execution.transfers import Mover
from quorum_attention.execution.visits import Rows, Visit
from quorum_attention.execution.workload import Group, Workload


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that every task reads its rows of; ``field`` is its place in the slot."""

    field: str
    rows: RowTensor


@dataclass(frozen=True, slots=True)
class State:
    """What accumulates row by row over the tasks.

    Attributes:
        field: its place in the slot.
        fill: the value of a row no task has visited.
        home: where rows wait between visits.
        final: where finished rows go; the home itself where no other dtype is asked for.
        final_field: the slot's place for finished rows in the final dtype, None where the state
            is final as it is.
    """

    field: str
    fill: float
    home: RowTensor | GroupBuffer
    final: RowTensor
    final_field: str | None

    @property
    def axis(self) -> Axis:
        """Whether the rows are those of queries or of keys."""
        return self.final.axis


@dataclass(frozen=True, slots=True)
class Unit:
    """One visit of one head group, in one slot."""

    group: Group
    visit: Visit
    slot: int
    previous_slot: int | None
    fields: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass: what goes into the slots, what accumulates, and how a unit is computed."""

    work: Workload
    layout: SlotLayout
    inputs: tuple[Input, ...]
    states: tuple[State, ...]
    compute: Callable[[Unit], None]


class Engine:
    """Works through units in order with ``n_cap`` slots carved from one arena."""

    def __init__(self, job: Pass, arena: torch.Tensor, n_cap: int, mover: Mover) -> None:
        size = job.layout.slot_bytes
        self.job = job
        self.mover = mover
        self.slots = [arena[i * size : (i + 1) * size] for i in range(n_cap)]
        self._views: dict[tuple[int, int, int, int, int], dict[str, torch.Tensor]] = {}

    def run(self, turns: Iterable[tuple[Group, Visit]], done: Callable[[Unit], None]) -> None:
        """Run ``turns`` in order; ``done`` is called once a unit's results are on their way."""
        ahead = max(1, len(self.slots) - 1)
        waiting: deque[Unit] = deque()
        source = self._units(turns)

        def fetch() -> None:
            unit = next(source, None)
            if unit is not None:
                self._load_inputs(unit)
                waiting.append(unit)

        fetch()
        if waiting:
            self._load_state(waiting[0])
        while waiting:
            unit = waiting.popleft()
            self._compute(unit)
            overlapped = len(self.slots) > 1
            if overlapped:
                while len(waiting) < ahead:
                    before = len(waiting)
                    fetch()
                    if len(waiting) == before:
                        break
                if waiting:
                    self._load_state(waiting[0])
            self._store(unit)
            done(unit)
            if not overlapped:
                fetch()
                if waiting:
                    self._load_state(waiting[0])

    def _units(self, turns: Iterable[tuple[Group, Visit]]) -> Iterator[Unit]:
        previous: Unit | None = None
        for index, (group, visit) in enumerate(turns):
            slot = index % len(self.slots)
            same_group = previous is not None and previous.group == group
            fields = self._fields(slot, group, visit)
            unit = Unit(
                group,
                visit,
                slot,
                previous.slot if previous is not None and same_group else None,
                fields,
            )
            yield unit
            previous = unit

    def _fields(self, slot: int, group: Group, visit: Visit) -> dict[str, torch.Tensor]:
        work, layout = self.job.work, self.job.layout
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

    def _limit(self, axis: Axis) -> int:
        return self.job.work.n_queries if axis == "query" else self.job.work.n_keys

    def _clipped(self, rows: Iterable[Rows], axis: Axis) -> Iterator[Rows]:
        limit = self._limit(axis)
        for piece in rows:
            part = piece.below(limit)
            if part is not None:
                yield part

    def _load_inputs(self, unit: Unit) -> None:
        runs = [Rows(start, stop, local) for start, stop, local in unit.visit.task.runs]
        with self.mover.input_stage(unit.slot):
            for item in self.job.inputs:
                target = unit.fields[item.field]
                blocks = item.rows.blocks(unit.group)
                for piece in self._clipped(runs, item.rows.axis):
                    n = piece.stop - piece.start
                    for entry, block in enumerate(blocks):
                        self.mover.load(
                            target[entry, :, piece.local : piece.local + n],
                            block[:, piece.start : piece.stop],
                        )

    def _load_state(self, unit: Unit) -> None:
        # With two slots or more the rows of the unit in between are carried, not loaded; every
        # other row was last stored by the unit before that one, or earlier.
        n_slots = len(self.slots)
        after = (unit.slot - min(2, n_slots)) % n_slots
        with self.mover.state_stage(unit.slot, after):
            for state in self.job.states:
                target = unit.fields[state.field]
                blocks = state.home.blocks(unit.group)
                for piece in self._clipped(unit.visit.loaded, state.axis):
                    n = piece.stop - piece.start
                    for entry, block in enumerate(blocks):
                        self.mover.load(
                            target[entry, :, piece.local : piece.local + n],
                            block[:, piece.start : piece.stop],
                        )

    def _compute(self, unit: Unit) -> None:
        with self.mover.compute_stage(unit.slot):
            for state in self.job.states:
                for piece in self._clipped(unit.visit.fresh, state.axis):
                    n = piece.stop - piece.start
                    unit.fields[state.field][:, :, piece.local : piece.local + n] = state.fill
            if unit.previous_slot is not None and unit.visit.carried:
                self._carry(unit, unit.previous_slot)
            self.job.compute(unit)
            for state in self.job.states:
                if state.final_field is None:
                    continue
                final, current = unit.fields[state.final_field], unit.fields[state.field]
                for piece in self._clipped(unit.visit.finished, state.axis):
                    local = slice(piece.local, piece.local + piece.stop - piece.start)
                    final[:, :, local] = current[:, :, local]

    def _carry(self, unit: Unit, previous_slot: int) -> None:
        previous = self._last_fields
        for state in self.job.states:
            limit = self._limit(state.axis)
            for carried in unit.visit.carried:
                piece = carried.rows.below(limit)
                if piece is None:
                    continue
                n = piece.stop - piece.start
                there = carried.previous_local
                unit.fields[state.field][:, :, piece.local : piece.local + n] = previous[
                    state.field
                ][:, :, there : there + n]
        self.mover.carried_from(previous_slot)

    def _store(self, unit: Unit) -> None:
        with self.mover.store_stage(unit.slot):
            for state in self.job.states:
                current = unit.fields[state.field]
                self._put(unit, state.axis, unit.visit.stored, current, state.home)
                finished = unit.fields[state.final_field] if state.final_field else current
                self._put(unit, state.axis, unit.visit.finished, finished, state.final)
        self._last_fields = unit.fields

    def _put(
        self,
        unit: Unit,
        axis: Axis,
        rows: Iterable[Rows],
        source: torch.Tensor,
        target: RowTensor | GroupBuffer,
    ) -> None:
        blocks = target.blocks(unit.group)
        for piece in self._clipped(rows, axis):
            local = slice(piece.local, piece.local + piece.stop - piece.start)
            for entry, block in enumerate(blocks):
                self.mover.store(block[:, piece.start : piece.stop], source[entry, :, local])
