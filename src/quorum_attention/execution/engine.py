"""Runs units of work through the slots: load, compute, store, each beside the next.

The engine knows rows and slots; what a unit computes is the pass's business (routes/slots.py),
how bytes move the mover's (device/mover.py), what to do about failures the runner's
(runner.py).
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
from quorum_attention.kernels.copies import copy_on_device

# Views of tensors that are kept: a few head groups' worth.
_MOST_BLOCKS = 64


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
    """One visit of one head group, in one slot; ``previous`` is the slot whose rows it carries on,
    with its fields."""

    group: Group
    visit: Visit
    slot: int
    fields: dict[str, torch.Tensor]
    previous: tuple[int, dict[str, torch.Tensor]] | None

    def from_home(self) -> Unit:
        """The same unit with all its state loaded, none carried: to run it once more."""
        carried = tuple(piece.rows for piece in self.visit.carried)
        visit = replace(self.visit, loaded=(*self.visit.loaded, *carried), carried=())
        return replace(self, visit=visit, previous=None)


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass: what goes into the slots, what accumulates, and how a unit is computed.

    Attributes:
        compute: runs a loaded unit.
        prepare: runs once on a unit's freshly loaded inputs, before ``compute``.
        spoiled: asked once a unit has been computed, of what it noted meanwhile: whether it should
            be run again. None: nothing to ask, so the host never waits.
        mended: asked of a spoiled unit with its inputs in the slot as they were given: whether to
            run it again, otherwise, from what was stored before it; False leaves it as it is.
        passed_on: inputs that may be copied from the slot before instead of loaded again.
        factor: what the finished rows of a group's queries or keys are multiplied by, (entries,
            heads, 1, 1) in the state's dtype; None is 1.
    """

    work: Workload
    layout: SlotLayout
    inputs: tuple[Input, ...]
    states: tuple[State, ...]
    compute: Callable[[Unit], None]
    prepare: Callable[[Unit], None] | None = None
    spoiled: Callable[[Unit], bool] | None = None
    mended: Callable[[Unit], bool] | None = None
    passed_on: frozenset[str] = frozenset()
    factor: Callable[[Group, Axis], torch.Tensor | None] | None = None


class Engine:
    """Works through units in order with ``n_cap`` slots carved from one arena."""

    def __init__(
        self, job: Pass, arena: torch.Tensor, n_cap: int, mover: Mover, clock: Clock
    ) -> None:
        size = job.layout.slot_bytes
        self.job = job
        self.mover = mover
        self.clock = clock
        self.slots = [arena[i * size : (i + 1) * size] for i in range(n_cap)]
        self._views: dict[tuple[int, int, int, int, int], dict[str, torch.Tensor]] = {}
        # Of the head groups at work; by identity, because the job holds on to them.
        self._blocks: dict[tuple[int, Group], list[torch.Tensor]] = {}

    def run(self, turns: Iterable[tuple[Group, Visit]], done: Callable[[Unit], None]) -> None:
        """Run ``turns`` in order; ``done`` is called once a unit's results are on their way."""
        overlapped = len(self.slots) > 1
        # Where the host looks at a unit's outcome, the next one is already computing meanwhile.
        lag = 1 if overlapped and self.job.spoiled is not None else 0
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
                # What had been computed by then stays done.
                while computed:
                    self._settle(computed, done)
            raise

    def _settle(self, computed: deque[Unit], done: Callable[[Unit], None]) -> None:
        """Store the first of ``computed``, where it is spoiled after having it mended."""
        spoiled = self.job.spoiled
        if spoiled is not None:
            self.mover.wait_computed(computed[0].slot)
            if spoiled(computed[0]):
                # Whatever fails meanwhile, none of them counts as computed.
                first, *followers = computed
                computed.clear()
                if self._mend(first):
                    for follower in followers:
                        self._run_again(follower)
                computed.extend((first, *followers))
        unit = computed.popleft()
        self._store(unit)
        done(unit)

    def _mend(self, unit: Unit) -> bool:
        """Run a spoiled unit again for as long as that helps; whether it was."""
        assert self.job.spoiled is not None
        assert self.job.mended is not None
        whole, changed = unit.from_home(), False
        while self.job.spoiled(unit):
            # Finished rows may lie over the inputs by now.
            self.mover.finish(wait=True)
            self._load_inputs(whole)
            self.mover.finish(wait=True)
            self._clear_padding(whole)
            if not self.job.mended(whole):
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
        work, layout = self.job.work, self.job.layout
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
        return self.job.work.n_queries if axis == "query" else self.job.work.n_keys

    def _clipped(self, rows: Iterable[Rows], axis: Axis) -> list[Rows]:
        limit = self._limit(axis)
        return [part for piece in rows if (part := piece.below(limit)) is not None]

    def _load_inputs(self, unit: Unit) -> None:
        runs = unit.visit.task.runs
        # What the slot before has of them is taken over on the device.
        new = runs if unit.previous is None else (*unit.visit.fresh, *unit.visit.loaded)
        with self.mover.input_stage(unit.slot):
            for item in self.job.inputs:
                passed_on = item.field in self.job.passed_on
                pieces = self._clipped(new if passed_on else runs, item.rows.axis)
                for entry, block in enumerate(self._blocks_of(item.rows, unit.group)):
                    self.mover.load(unit.fields[item.field][entry], block, pieces)

    def _load_state(self, unit: Unit) -> None:
        # With two slots or more the rows of the unit in between are carried, not loaded; every
        # other row was last stored by the unit before that one, or earlier.
        n_slots = len(self.slots)
        after = (unit.slot - min(2, n_slots)) % n_slots
        with self.mover.state_stage(unit.slot, after):
            for state in self.job.states:
                pieces = self._clipped(unit.visit.loaded, state.axis)
                for entry, block in enumerate(self._blocks_of(state.home, unit.group)):
                    self.mover.load(unit.fields[state.field][entry], block, pieces)

    def _compute(self, unit: Unit) -> None:
        with self.mover.compute_stage(unit.slot):
            with self.clock.timed("gather"):
                for state in self.job.states:
                    for piece in self._clipped(unit.visit.fresh, state.axis):
                        n = piece.stop - piece.start
                        unit.fields[state.field][:, :, piece.local : piece.local + n] = state.fill
                if unit.previous is not None:
                    self._carry(unit, *unit.previous)
                self._clear_padding(unit)
                if self.job.prepare is not None:
                    self.job.prepare(unit)
            with self.clock.timed("compute"):
                self.job.compute(unit)
            with self.clock.timed("scatter"):
                self._finish(unit)

    def _clear_padding(self, unit: Unit) -> None:
        if is_filled(unit.visit.task, self.job.work):
            end = unit.visit.task.count_below(self.job.work.n_tokens)
            for item in self.job.inputs:
                unit.fields[item.field][:, :, end:] = 0

    def _finish(self, unit: Unit, *, over_inputs: bool = False) -> None:
        """Bring finished rows into their final form; ``over_inputs``: only those not in place."""
        for state in self.job.states:
            factor = None
            if self.job.factor is not None:
                factor = self.job.factor(unit.group, state.axis)
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
        fields = [(state.field, state.axis) for state in self.job.states]
        fields += [
            (item.field, item.rows.axis)
            for item in self.job.inputs
            if item.field in self.job.passed_on
        ]
        for field, axis in fields:
            limit = self._limit(axis)
            for carried in unit.visit.carried:
                piece = carried.rows.below(limit)
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
            for state in self.job.states:
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
