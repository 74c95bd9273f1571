"""The head groups of a pass on the route ``passing``, one after the other: chunks that stay, and
blocks that pass by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quorum_attention.decomposition import Decomposition, Rows
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.tasks import Span, Task
from quorum_attention.execution.control.machine import Machine
from quorum_attention.execution.control.visits import Visit
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.job import Job
from quorum_attention.execution.rows import Axis, group_part
from quorum_attention.execution.scaling import Computed, Steps, asking
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.slot_rows import Input, SlotRows, State, Unit, accumulate
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.workload import Group
from quorum_attention.kernels.scaling import Scaling, value_norms

if TYPE_CHECKING:
    from quorum_attention.execution.routes.passing import Passing


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
