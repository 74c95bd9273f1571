"""The route of chunks that stay on the device while blocks of the other side stream
past.

In a forward queries stay, and keys and values stream past: the statistics of a chunk
never leave the device. In a backward keys and values stay with their gradients, and
queries stream past with theirs, which wait in host memory between chunks. Where memory
is tight that moves far fewer bytes than tasks through slots, in fewer and longer
copies, and the kernel gets larger rectangles (docs/planner.md). With two slots for
chunks, one chunk computes while the one before it is stored and the next one is loaded.

If memory runs out, the unfinished head groups go through slots, by the decomposition
that the schedule has for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count, cycle
from typing import Any

from quorum_attention.decomposition import Decomposition, Rectangle, Rows
from quorum_attention.decomposition.chunk_stream import ChunkStream
from quorum_attention.decomposition.decomposition import Span, Task
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.rectangles import Batch
from quorum_attention.execution.control.controller import Group, RecoveryController
from quorum_attention.execution.control.visits import Visit
from quorum_attention.execution.device.allocate import home_device
from quorum_attention.execution.engine import Engine, StayingRows
from quorum_attention.execution.footprint import (
    Footprint,
    home_bytes,
    moved_bytes,
    result_bytes,
)
from quorum_attention.execution.head_groups import Axis, count_groups
from quorum_attention.execution.job import PassJob
from quorum_attention.execution.pass_spec import TensorsByName
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.routes.slots import Slots, layout_of, scaling_of
from quorum_attention.execution.scaling import (
    SMALL_BYTES,
    BackwardScaling,
    inputs_of_group,
)
from quorum_attention.execution.schedule import DEEPEN_BY, Route, Schedule
from quorum_attention.execution.slot_layout import SlotLayout
from quorum_attention.execution.slot_rows import (
    PassStorage,
    SlotRows,
    StayingChunk,
    Unit,
    open_pass_storage,
    open_slots,
)
from quorum_attention.execution.work_counts import WorkCounts
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.protocol import Launches
from quorum_attention.units import counted


@dataclass(frozen=True, slots=True)
class Streaming(Route):
    """A chunk of queries (forward) or of keys (backward) stays; blocks of the others
    stream past.

    Attributes:
        resident_axis: the side whose chunks stay: of queries, or of keys.
        queries, keys: rows of a chunk, and of a block.
        instead: the route through slots that takes over.
        deeper_by: how many levels further than the schedule's decomposition the tasks
            through slots are cut, to fit with the schedule's head group.
        n_cap: blocks resident at once.
        chunk_slots: chunks resident at once.
    """

    n_cap: int = 2
    chunk_slots: int = 2
    resident_axis: Axis = "query"
    queries: int = 1
    keys: int = 1
    instead: Slots = field(default_factory=Slots)
    deeper_by: int = 0

    recovery = "streaming: failed", "through slots"

    @property
    def accumulators(self) -> str:
        """Where states wait; in a forward none does."""
        return "none" if self.resident_axis == "query" else "host"

    @property
    def words(self) -> str:
        """A description of the route for people."""
        queries = counted(self.queries, "query", "queries")
        keys = counted(self.keys, "key")
        chunk, block = (
            (queries, keys) if self.resident_axis == "query" else (keys, queries)
        )
        return f"{chunk} stay, {block} at a time stream by (tasks only if that fails)"

    def parts(self, schedule: Schedule, shape: CallShape) -> str:
        """How often a block streams past."""
        return f"{counted(self.stream(shape).n_units, 'time')} a block and a chunk"

    @property
    def streamed_axis(self) -> Axis:
        """The other side."""
        return "key" if self.resident_axis == "query" else "query"

    def rows(self, axis: Axis) -> int:
        """Rows of a chunk or block of this side."""
        return self.queries if axis == "query" else self.keys

    def task_rows(
        self, decomposition: Decomposition, shape: CallShape
    ) -> tuple[int, int]:
        """A chunk and a block."""
        return min(self.queries, shape.n_queries), min(self.keys, shape.n_keys)

    def limits(self, decomposition: Decomposition, shape: CallShape) -> tuple[int, int]:
        """A chunk and a block are one rectangle."""
        return self.task_rows(decomposition, shape)

    def runs(self, schedule: Schedule, problem: Problem) -> bool:
        """Whether the kernel takes rectangles one by one, wherever they are, and
        nothing else depends on where they are."""
        shape = problem.shape
        kernel = problem.kernel
        if not kernel.operator or kernel.launches is not Launches.CALLS_ON_STREAMS:
            return False
        if kernel.own_attention:
            return False
        if shape.bias is not None or shape.dropout or kernel.sparse:
            return False
        resident_axis = "key" if problem.spec.backward else "query"
        return (
            self.resident_axis == resident_axis
            and min(shape.n_queries, shape.n_keys) > 0
        )

    def stream(self, shape: CallShape) -> ChunkStream:
        """The pairs of a head, chunk by chunk and block by block."""
        return ChunkStream(
            self.resident_axis,
            shape.n_queries,
            shape.n_keys,
            self.queries,
            self.keys,
            shape.is_causal,
        )

    def _layouts(
        self, schedule: Schedule, problem: Problem
    ) -> tuple[SlotLayout, SlotLayout]:
        """The memory of a chunk, and of a block."""
        chunk = layout_of(
            schedule,
            problem,
            self.resident_axis,
            ends_in_slot=True,
        )
        block = layout_of(schedule, problem, self.streamed_axis)
        return chunk, block

    def memory_use(self, schedule: Schedule, problem: Problem) -> Footprint:
        """The chunks, the blocks, the workspace of a rectangle, and what the budget
        counts of results and states."""
        chunk, block = self._layouts(schedule, problem)
        homes = home_bytes(problem, schedule.group, "host")
        # A factor for each block, the flags, and the norm of value.
        n_small = self.n_cap + 2
        scaling = (SMALL_BYTES,) * n_small if problem.scaled else ()
        return Footprint(
            problem.shape.device_type,
            workspace=problem.workspace(schedule.extent(problem.shape)),
            slots=chunk.bytes_of(self.chunk_slots) + block.bytes_of(self.n_cap),
            accumulators=(*homes, *scaling),
            results=(problem.place.rescaled_grad_bytes or 0, *result_bytes(problem)),
        )

    def work_counts(self, schedule: Schedule, problem: Problem) -> WorkCounts:
        """Rows that stay are copied once; rows that stream past, for every chunk that
        they meet."""
        shape = problem.shape
        spec = problem.spec
        stream = self.stream(shape)
        resident_inputs, _ = moved_bytes(problem, self.resident_axis)
        streamed_inputs, streamed_states = moved_bytes(problem, self.streamed_axis)
        result_size = problem.place.result_dtype.itemsize
        results = sum(state.count(shape) for state in spec.states) * result_size
        n_groups = count_groups(shape, schedule.group)
        n_units = stream.n_units
        visits = n_units / max(1, stream.n_blocks)
        waiting_states = max(0.0, visits - 1) * streamed_states
        up = resident_inputs + visits * streamed_inputs + waiting_states
        down = results + waiting_states
        # With a single slot for chunks, nothing computes while one is stored and the
        # next one loaded. With two, this holds for the first and the last one only.
        overlapping_units = (up + down) / max(1, resident_inputs + results)
        if self.chunk_slots > 1:
            overlapping_units *= n_groups * stream.n_chunks
        streamed_copies = sum(item.axis == self.streamed_axis for item in spec.inputs)
        state_copies = sum(state.axis == self.streamed_axis for state in spec.states)
        return WorkCounts(
            units=n_groups * n_units,
            calls=partial(_calls, stream),
            up=up,
            down=down,
            resident=problem.place.resident,
            overlapping_units=max(1, round(overlapping_units)),
            in_slots=True,
            run_copies=streamed_copies + 2 * state_copies,
        )

    def slots(self, **changes: Any) -> Slots:
        """The route that takes over."""
        return self.instead.slots(**changes)

    def slots_decomposition(self, decomposition: Decomposition) -> Decomposition:
        """The decomposition of the tasks that take over."""
        for _ in range(self.deeper_by):
            decomposition = decomposition.deeper(DEEPEN_BY)
        return decomposition

    def run(
        self,
        job: PassJob,
        schedule: Schedule,
        controller: RecoveryController,
        storage: PassStorage | None,
    ) -> Iterator[int]:
        """Compute the head groups that are left, one after the other."""
        home = home_device("host", job.device)
        waiting = (self.streamed_axis,) if self.stream(job.shape).n_chunks > 1 else ()
        chunk, block = self._layouts(schedule, job.problem)
        scaling = scaling_of(job, schedule.group, self.n_cap, by_unit=False)
        with (
            open_pass_storage(job, schedule.group, home, waiting) as own_storage,
            open_slots(
                job,
                own_storage,
                (block, self.n_cap),
                (chunk, self.chunk_slots),
            ) as (blocks, chunks),
        ):
            staying = StayingRows(job, chunks)
            engine = Engine(
                job,
                schedule.limits,
                blocks,
                scaling,
                staying,
            )
            units = self._units(job, blocks, chunks, scaling, controller)
            for _ in engine.run(units):
                yield 1

    def _units(
        self,
        job: PassJob,
        blocks: SlotRows,
        chunks: SlotRows,
        scaling: BackwardScaling | None,
        controller: RecoveryController,
    ) -> Iterator[Unit]:
        """Every block of every chunk of the head groups that are left. A group that
        overflowed is run again, scaled down further."""
        units_of = partial(
            self._units_of,
            job.shape,
            blocks,
            chunks,
            count(),
            cycle(chunks.slots),
        )
        n_groups = len(controller.groups_left)
        for n_done, group in enumerate(controller.whole_groups(), start=1):
            if scaling is None:
                yield from units_of(group)
            else:
                scaling.begin()
                read_inputs = partial(_read_inputs, job, blocks, group)
                for n_repeats in scaling.runs(read_inputs):
                    if n_repeats:
                        job.count_repeat()
                    yield from units_of(group)
            job.report_progress(n_done, n_groups)
            # The engine asks for no unit before the stores of all earlier ones are
            # given.
            job.report_stored(group, blocks.mover)

    def _units_of(
        self,
        shape: CallShape,
        blocks: SlotRows,
        chunks: SlotRows,
        numbers: Iterator[int],
        chunk_slots: Iterator[int],
        group: Group,
    ) -> Iterator[Unit]:
        """Every block of every chunk of one head group.

        Args:
            numbers: of units, all head groups together: blocks take slots in turn.
            chunk_slots: of chunks.
        """
        stream = self.stream(shape)
        sequence = Decomposition(shape.n_tokens).task(())
        # The number of the last unit of each block.
        last_units: dict[int | None, int] = {}
        for chunk in range(stream.n_chunks):
            chunk_rows = stream.chunk(chunk)
            chunk_slot = next(chunk_slots)
            chunk_unit = _unit(chunks, group, chunk_rows, chunk_slot, chunk_slot)
            # A chunk without pairs still has results: it meets an empty block.
            met_blocks: list[int | None] = [*stream.blocks(chunk)] or [None]
            for block in met_blocks:
                staying = StayingChunk(
                    chunk_unit,
                    sequence,
                    () if block is None else stream.rectangles(chunk, block),
                    opens=block == met_blocks[0],
                    closes=block == met_blocks[-1],
                )
                number = next(numbers)
                slot = number % self.n_cap
                # Stores follow each other: all that are older than this slot's last one
                # are over with it.
                last_unit = last_units.get(block, -1)
                is_recent = last_unit > number - self.n_cap
                after = last_unit % self.n_cap if is_recent else slot
                rows = Interval(0, 0) if block is None else stream.block(block)
                unit = _unit(
                    blocks,
                    group,
                    rows,
                    slot,
                    after,
                    is_first=chunk == 0,
                    is_last=block is None or chunk == stream.last_chunk(block),
                )
                yield replace(unit, staying=staying)
                last_units[block] = number


def _read_inputs(job: PassJob, blocks: SlotRows, group: Group) -> TensorsByName:
    """The inputs of a head group, after all copies in flight."""
    blocks.mover.finish(wait=True)
    return inputs_of_group(job.tensors, group)


def _unit(
    side: SlotRows,
    group: Group,
    interval: Interval,
    slot: int,
    after: int,
    *,
    is_first: bool = True,
    is_last: bool = True,
) -> Unit:
    """Neighbouring rows of one side in a slot.

    Args:
        after: states are loaded after the last store of this slot.
        is_first: whether the states of the rows begin with this unit; if not, they are
            loaded.
        is_last: whether the states of the rows end with this unit; if not, they wait
            between units.
    """
    rows = (Rows(*interval, 0),)
    visit = Visit(
        Task((), (Span(*interval, 0),)),
        fresh=rows if is_first else (),
        carried=(),
        loaded=() if is_first else rows,
        finished=rows if is_last else (),
        stored=() if is_last else rows,
    )
    fields = side.fields(slot, group, visit)
    return Unit(group, visit, slot, fields, after)


@lru_cache(maxsize=256)
def _calls(stream: ChunkStream) -> tuple[tuple[Batch, int], ...]:
    """The rectangles of a head, as calls: how many of each size there are."""
    n_calls: Counter[Batch] = Counter()
    for chunk in range(stream.n_chunks):
        full_blocks = stream.full_blocks(chunk)
        # The first full block stands for all: they have the same rectangles.
        times = {full_blocks[0]: len(full_blocks)} if full_blocks else {}
        for block in stream.blocks(chunk):
            if block not in full_blocks:
                times[block] = 1
        for block, n_times in times.items():
            for r in stream.rectangles(chunk, block):
                call = Batch(
                    Rectangle(
                        0,
                        r.n_queries,
                        0,
                        r.n_keys,
                        r.causal,
                    )
                )
                n_calls[call] += n_times
    return tuple(n_calls.items())
