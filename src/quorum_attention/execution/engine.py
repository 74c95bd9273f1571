"""Runs units through slots: load, compute, store, overlapped with the units before and after.

A unit has all its rows in its slot, or its rows stream by others that stay in a slot of their own
(``Beside``). How bytes are copied is up to the mover (device/mover.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from quorum_attention.errors import is_out_of_memory
from quorum_attention.execution.call import Job, Tools
from quorum_attention.execution.problem import Group, RowSpec
from quorum_attention.execution.scaling import GroupScaling, UnitScaling
from quorum_attention.execution.slot_rows import SlotRows, Unit
from quorum_attention.execution.trimming import is_filled
from quorum_attention.kernels.scaling import Scaling


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
    scaling: UnitScaling | GroupScaling | None = None
    staying: SlotRows | None = None
    _stored_last: Group | None = field(default=None, init=False)

    def run(self, units: Iterable[Unit]) -> Iterator[Unit]:
        """Run ``units`` in order; yields each once the copies of its results are issued."""
        n_slots = len(self.rows.slots)
        # A unit is settled one unit late if the host has to look at its flags, so that the device
        # computes the next one meanwhile.
        lag = 1 if n_slots > 1 and isinstance(self.scaling, UnitScaling) else 0
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
        if isinstance(self.scaling, UnitScaling):
            self.rows.mover.wait_computed(computed[0].slot)
            if self.scaling.overflowed(computed[0]):
                # If this fails, none of them counts as computed.
                first, *followers = computed
                computed.clear()
                if self._repeat(first, self.scaling):
                    for follower in followers:
                        self._run_again(follower)
                computed.extend((first, *followers))
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

    def _repeat(self, unit: Unit, scaling: UnitScaling) -> bool:
        """Run a unit that overflowed again for as long as that helps; returns whether it did."""
        whole, changed = unit.from_home(), False
        while scaling.overflowed(unit):
            # Finished rows may have overwritten the inputs.
            self.rows.mover.finish(wait=True)
            self.rows.load_inputs(whole)
            self.rows.mover.finish(wait=True)
            self.rows.fill_up(whole)
            if not scaling.repeats(whole):
                with self.rows.mover.compute_stage(unit.slot):
                    self.rows.finish(unit, over_inputs=True)
                self.rows.mover.wait_computed(unit.slot)
                break
            self.rows.load_states(whole)
            self._compute(whole)
            self.rows.mover.wait_computed(unit.slot)
            changed = True
        return changed

    def _run_again(self, unit: Unit) -> None:
        self.rows.mover.finish(wait=True)
        self.rows.load_inputs(unit)
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
                self.rows.fill_up(unit)
                scaling = self.scaling if _has_pairs(unit) else None
                scaled = Scaling() if scaling is None else scaling.prepare(unit)
            with self.tools.clock.timed("compute"):
                if _has_pairs(unit):
                    self._accumulate(unit, scaled)
                if isinstance(scaling, UnitScaling):
                    scaling.computed(unit)
            with self.tools.clock.timed("scatter"):
                self.rows.finish(unit)

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
            # A kernel with its own attention may call a user's function with positions, so it must
            # not get the padding beyond the last token.
            filled = is_filled(task, work) and not kernel.own_attention
            n_queries, n_keys = (None, None) if filled else (work.n_queries, work.n_keys)
            rectangles = task.rectangles(work.is_causal, n_queries, n_keys, *self.limits)

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
