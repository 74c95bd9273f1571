"""Runs units through slots: load, compute, store, overlapped with the units before and
after.

A unit has all its rows in its slot, or its rows stream by others that stay in a slot of
their own (``StayingRows``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.errors import is_out_of_memory
from quorum_attention.execution.head_groups import Group
from quorum_attention.execution.job import PassJob
from quorum_attention.execution.pass_spec import RowSpec, TensorsByName
from quorum_attention.execution.scaling import BackwardScaling
from quorum_attention.execution.slot_rows import SlotRows, Unit
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.tensors import NamedTensors


class StoringError(RuntimeError):
    """Results of a unit are stored in part: to compute it again would add that part
    twice. So it is not recovered from, as running out of memory is elsewhere."""


@dataclass(frozen=True, slots=True)
class StayingRows:
    """Rows that stay in a slot of their own while units stream by.

    Attributes:
        rows: moves them.
    """

    job: PassJob
    rows: SlotRows

    @property
    def has_one_slot(self) -> bool:
        """Whether rows are loaded into the slot from which those before them are
        stored."""
        return len(self.rows.slots) == 1

    def open(self, unit: Unit) -> None:
        """Load the rows that stay, and begin their states, before the first unit
        streams by."""
        chunk = unit.staying
        if chunk is None or not chunk.opens:
            return
        self.rows.load_inputs(chunk.unit)
        self.rows.load_states(chunk.unit)
        with (
            self.rows.mover.compute_stage(chunk.unit.slot),
            self.job.clock.timed("gather"),
        ):
            self.rows.fill(chunk.unit)

    def close(self, unit: Unit) -> None:
        """Finish and store the rows that stay, after the last unit that streams by."""
        chunk = unit.staying
        if chunk is None or not chunk.closes:
            return
        with (
            self.rows.mover.compute_stage(chunk.unit.slot),
            self.job.clock.timed("scatter"),
        ):
            self.rows.finish(chunk.unit)
        self.rows.store(chunk.unit)


@dataclass(slots=True)
class Engine:
    """Runs units in order.

    Attributes:
        limits: most queries and keys of a rectangle.
        rows: moves the rows of units.
        scaling: scales a backward; None: it is not scaled.
        staying: the rows that stay; None: none do.
    """

    job: PassJob
    limits: tuple[int, int]
    rows: SlotRows
    scaling: BackwardScaling | None = None
    staying: StayingRows | None = None
    _stored_group: Group | None = field(default=None, init=False)

    def run(self, units: Iterable[Unit]) -> Iterator[Unit]:
        """Run ``units`` in order; yields each once the copies of its results are
        issued.

        The stages of neighbouring units overlap on the device. With two slots, while
        unit k computes::

            load       k + 1
            compute    k
            store      k - 1

        With more slots, more units are loaded ahead. The host may have to wait before
        it can store unit k - 1, for page locks or for the overflow flags of a scaled
        backward. So unit k is launched first.
        """
        n_slots = len(self.rows.slots)
        # The rows that stay are stored with their last unit: before those that stay
        # next are loaded.
        n_unsettled = 1 if n_slots > 1 and self.staying is None else 0
        # The rows that stay are loaded with their first unit: not before the last unit
        # beside the rows that stayed before.
        n_ahead = 1 if self.staying is not None else max(1, n_slots - 1)
        remaining = iter(units)
        loaded: deque[Unit] = deque()
        computed: deque[Unit] = deque()
        try:
            self._load_ahead(remaining, loaded, 1)
            while loaded:
                unit = loaded.popleft()
                self._compute(unit)
                computed.append(unit)
                while len(computed) > n_unsettled:
                    yield self._settle(computed)
                self._load_ahead(remaining, loaded, n_ahead)
            while computed:
                yield self._settle(computed)
        except Exception as error:
            if is_out_of_memory(error):
                # Units that were computed before the failure stay done.
                while computed:
                    yield self._settle(computed)
            raise

    @property
    def _unit_scaling(self) -> BackwardScaling | None:
        """The scaling whose overflow flags the host reads for each unit before it is
        stored."""
        if self.scaling is None or not self.scaling.by_unit:
            return None
        return self.scaling

    def _load_ahead(
        self, remaining: Iterator[Unit], loaded: deque[Unit], n_ahead: int
    ) -> None:
        """Load inputs until ``n_ahead`` units have theirs, and the states of the next
        unit."""
        while len(loaded) < n_ahead:
            unit = next(remaining, None)
            if unit is None:
                break
            if self.staying is not None and not self.staying.has_one_slot:
                self.staying.open(unit)
            self.rows.load_inputs(unit)
            loaded.append(unit)
        if loaded:
            self.rows.load_states(loaded[0])
            if self.staying is not None and self.staying.has_one_slot:
                # Last, because it waits until the rows that stayed before are stored.
                self.staying.open(loaded[0])

    def _compute(self, unit: Unit) -> None:
        """Prepare a unit's states, add its pairs, and finish the rows that no later
        unit has."""
        timed = self.job.clock.timed
        with self.rows.mover.compute_stage(unit.slot):
            with timed("gather"):
                self.rows.fill(unit)
                self.rows.carry(unit)
                undo = self._divide(unit)
            if unit.has_pairs:
                with timed("compute"):
                    self._accumulate(unit, undo)
            with timed("scatter"):
                self.rows.finish(unit)

    def _divide(self, unit: Unit) -> Scaling:
        """Divide a unit's upstream gradient in its slot, if the backward is scaled;
        returns how a kernel undoes that."""
        if self.scaling is None or not unit.has_pairs:
            return Scaling()
        chunk = unit.staying
        value_unit = unit if chunk is None else chunk.unit
        return self.scaling.divide_(
            unit.fields["grad_out"],
            value_unit.fields["value"],
            unit.slot,
            is_same_value=chunk is not None and not chunk.opens,
        )

    def _accumulate(self, unit: Unit, undo: Scaling) -> None:
        """Add the pairs of a unit to the states in its slot, and in that of the rows
        that stay."""
        job = self.job
        shape = job.shape
        chunk = unit.staying
        fields: TensorsByName
        rectangles: Sequence[Rectangle]
        if chunk is None:
            fields = unit.fields
            task = unit.visit.task
            rectangles = task.rectangles(
                shape.is_causal, shape.n_queries, shape.n_keys, *self.limits
            )
        else:
            fields = {**chunk.unit.fields, **unit.fields}
            task = chunk.task
            rectangles = chunk.rectangles
        query_key_value = (fields["query"], fields["key"], fields["value"])
        tensors = job.task_tensors(
            task,
            rectangles,
            unit.group,
            self.limits,
            query_key_value,
        )
        saved: NamedTensors = {}
        for item in job.spec.saved_inputs:
            saved[item.name] = _without_column(fields[item.name], item)
        states = [
            _without_column(fields[f"state_{state.name}"], state)
            for state in job.spec.states
        ]
        job.spec.accumulate(
            job.kernel,
            tensors,
            saved,
            states,
            undo,
        )
        if self.scaling is not None:
            self.scaling.computed(unit.slot)

    def _settle(self, computed: deque[Unit]) -> Unit:
        """Store the first unit of ``computed``; if it overflowed, repeat it first."""
        scaling = self._unit_scaling
        if scaling is not None:
            slot = computed[0].slot
            self.rows.mover.wait_computed(slot)
            if scaling.overflowed(slot):
                self._repeat_first(computed, scaling)
            scaling.begin(slot)
        unit = computed.popleft()
        self._store(unit)
        # Units come group by group.
        if self._stored_group is not None and unit.group != self._stored_group:
            self.rows.release(self._stored_group)
            if self.staying is not None:
                self.staying.rows.release(self._stored_group)
        self._stored_group = unit.group
        return unit

    def _store(self, unit: Unit) -> None:
        """Store a unit's rows.

        Raises:
            StoringError: memory ran out in the middle.
        """
        try:
            if self.staying is not None and self.staying.has_one_slot:
                # First, because the rows that stay next wait for it.
                self.staying.close(unit)
            self.rows.store(unit)
            if self.staying is not None and not self.staying.has_one_slot:
                self.staying.close(unit)
        except Exception as error:
            # Units that stream by begin anew with their head group.
            if is_out_of_memory(error) and self.staying is None:
                raise StoringError(
                    "memory ran out while a unit's results were copied out of its "
                    f"slot, so it is not known which of them arrived: {error}"
                ) from error
            raise

    def _repeat_first(self, computed: deque[Unit], scaling: BackwardScaling) -> None:
        """Repeat the first unit, and the units after it, which carried its rows on."""
        units = list(computed)
        # If this fails, none of them counts as computed.
        computed.clear()
        if self._repeat(units[0], scaling):
            for follower in units[1:]:
                self._reload(follower)
                self._run_again(follower)
        computed.extend(units)

    def _repeat(self, unit: Unit, scaling: BackwardScaling) -> bool:
        """Run a unit that overflowed again for as long as that helps; returns whether
        it did."""
        reloaded = unit.from_home()
        read_inputs = partial(self._read_inputs, reloaded)
        n_repeats = 0
        for n_repeats in scaling.runs(read_inputs, unit.slot):
            if n_repeats:
                self.job.count_repeat()
                self._run_again(reloaded)
        if scaling.overflowed(unit.slot):
            with self.rows.mover.compute_stage(unit.slot):
                self.rows.finish(unit, was_finished=True)
            self.rows.mover.wait_computed(unit.slot)
        return n_repeats > 0

    def _read_inputs(self, unit: Unit) -> TensorsByName:
        """A unit's inputs in its slot, loaded again: finished rows may have overwritten
        them."""
        self._reload(unit)
        self.rows.mover.finish(wait=True)
        return unit.fields

    def _reload(self, unit: Unit) -> None:
        """Load a unit's inputs again, after all copies in flight."""
        self.rows.mover.finish(wait=True)
        self.rows.load_inputs(unit)

    def _run_again(self, unit: Unit) -> None:
        """Compute a unit again from its stored states, and wait for it."""
        self.rows.load_states(unit)
        self._compute(unit)
        self.rows.mover.wait_computed(unit.slot)


def _without_column(tensor: torch.Tensor, rows: RowSpec) -> torch.Tensor:
    """A slot's field (b, h, n, width) as kernels get it: (b, h, n) for one number a
    row."""
    return tensor.squeeze(-1) if rows.width == "one" else tensor
