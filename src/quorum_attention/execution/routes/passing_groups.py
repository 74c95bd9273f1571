"""The head groups of a pass on the route ``passing``, one after the other: chunks that stay, and
blocks that pass by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quorum_attention.decomposition import Decomposition, Rows
from quorum_attention.execution.control.machine import Machine
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.residency import Residency
from quorum_attention.execution.job import Job
from quorum_attention.execution.pass_spec import StateSpec
from quorum_attention.execution.routes.slots import accumulator, with_columns
from quorum_attention.execution.rows import Axis, GroupBuffer, RowTensor, group_part
from quorum_attention.execution.scaling import Computed, Steps, asking
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.workload import Group
from quorum_attention.kernels.scaling import Scaling, value_norms

if TYPE_CHECKING:
    from quorum_attention.execution.routes.passing import Passing


class OverflowedError(torch.OutOfMemoryError):
    """A scaled gradient overflowed where inputs are not finite: tasks through slots find out which
    rows that leaves. It is recovered from as if memory had run out."""


@dataclass(frozen=True, slots=True)
class Tensors:
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
    def of(cls, job: Job, schedule: Schedule, route: Passing) -> Tensors:
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


class Passes:
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
        tensors: Tensors,
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
            self.flags = torch.zeros(shape, dtype=torch.int32, pin_memory=pins, device="cpu")

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
        overflow = self.overflow[:, : self.heads]
        return Scaling(self.steps.shift, unscale, overflow)

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
