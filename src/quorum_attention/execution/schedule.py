"""A schedule: how a pass is decomposed into tasks and head groups, and the route it
runs by."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quorum_attention.arithmetic import ceil_div, round_up
from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.control.controller import RecoveryController
from quorum_attention.execution.device.allocate import Home
from quorum_attention.execution.footprint import Footprint
from quorum_attention.execution.head_groups import Group, GroupSize, head_groups
from quorum_attention.execution.job import PassJob
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.slot_rows import PassStorage
from quorum_attention.execution.trimmed_tasks import TrimmedSizes
from quorum_attention.execution.work_counts import WorkCounts
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.quorums import quorum_size
from quorum_attention.units import counted

# Chunks of each level that a recovery adds: its tasks have about 3/7 of the tokens.
DEEPEN_BY = 7


@dataclass(frozen=True, slots=True)
class Route(ABC):
    """How a pass runs; each route is a subclass (execution/routes).

    Attributes:
        measured: whether the report measures its stages.
        whole_groups: whether its units are whole head groups, so that a failed group
            begins anew.
        recovery: what failed where ``fallback`` is taken, and what is done instead, in
            words.
        n_cap: slots, i.e. tasks resident at once.
        accumulator: where the state lives between the visits of a task.
        streams: kernel calls of a task in flight at once.
        trimmed: sizes of the trimmed tasks; None: they are not trimmed, or it is not
            known.
    """

    measured: ClassVar[bool] = True
    whole_groups: ClassVar[bool] = True
    recovery: ClassVar[tuple[str, str]] = "", ""

    n_cap: int = 1
    accumulator: Home = "device"
    streams: int = 1
    trimmed: TrimmedSizes | None = None

    @property
    def accumulators(self) -> str:
        """The home of the state, for reports: "device", "host", or "none"."""
        return self.accumulator

    @property
    @abstractmethod
    def words(self) -> str:
        """The route in words, for people."""

    def parts(self, schedule: Schedule, shape: CallShape) -> str:
        """The parts that a head group is computed in, in words."""
        return counted(schedule.n_tasks, "task")

    def task_rows(
        self, decomposition: Decomposition, shape: CallShape
    ) -> tuple[int, int]:
        """Query rows and key rows of the largest task that a kernel gets."""
        return shape.n_queries, shape.n_keys

    @abstractmethod
    def limits(self, decomposition: Decomposition, shape: CallShape) -> tuple[int, int]:
        """Most queries and keys of a rectangle, before any limit is put on them."""

    @abstractmethod
    def runs(self, schedule: Schedule, problem: Problem) -> bool:
        """Whether the route can run the pass ``problem``."""

    @abstractmethod
    def memory_use(self, schedule: Schedule, problem: Problem) -> Footprint:
        """Most device bytes that it takes."""

    @abstractmethod
    def work_counts(self, schedule: Schedule, problem: Problem) -> WorkCounts:
        """The work it makes, in counts, for the planner's cost model."""

    @abstractmethod
    def slots(self, **changes: Any) -> Route:
        """The route through slots that replaces this one, with fields changed."""

    def slots_decomposition(self, decomposition: Decomposition) -> Decomposition:
        """The decomposition of the schedule through slots that replaces this one's."""
        return decomposition

    def fallback(self, schedule: Schedule, shape: CallShape) -> Schedule:
        """The schedule, through slots, to continue with when memory runs out for whole
        groups."""
        return schedule.through_slots(shape)

    def groups(self, job: PassJob, schedule: Schedule) -> list[Group]:
        """The head groups it computes, in order."""
        return list(head_groups(job.shape, schedule.group))

    def open_storage(
        self, job: PassJob, schedule: Schedule
    ) -> AbstractContextManager[PassStorage | None]:
        """Open what all attempts of a pass share; None if they share nothing."""
        return nullcontext()

    @abstractmethod
    def run(
        self,
        job: PassJob,
        schedule: Schedule,
        controller: RecoveryController,
        storage: PassStorage | None,
    ) -> Iterator[int]:
        """One attempt: run the units that the controller has left. Yields, each time
        that some are done, how many.

        Args:
            storage: of ``open_storage``.
        """


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one pass of one call runs; made by ``schedule_of``.

    Attributes:
        decomposition: of the tokens into tasks.
        group: batch entries and key/value heads of a unit.
        route: how the pass runs.
        max_queries, max_keys: limits of every rectangle, which bound a kernel's
            workspace.
        pinned: whether the user chose the depth; failures are then reported, not
            recovered from.
    """

    decomposition: Decomposition
    group: GroupSize
    route: Route
    max_queries: int = 1
    max_keys: int = 1
    pinned: bool = False

    @property
    def limits(self) -> tuple[int, int]:
        """Most queries and keys of a rectangle."""
        return self.max_queries, self.max_keys

    @property
    def trimmed_share(self) -> float:
        """The share of tokens that is trimmed from the tasks."""
        trimmed = self.route.trimmed
        return 0.0 if trimmed is None else trimmed.trimmed_share

    @property
    def largest_task(self) -> int:
        """Tokens of the largest task."""
        trimmed = self.route.trimmed
        return (
            self.decomposition.max_task_tokens if trimmed is None else trimmed.largest
        )

    @property
    def n_tasks(self) -> int:
        """Tasks of one head group."""
        trimmed = self.route.trimmed
        return self.decomposition.n_tasks if trimmed is None else trimmed.n_tasks

    def visits(self, shape: CallShape) -> float:
        """How many tasks hold a row, on average."""
        if self.route.trimmed is not None:
            return self.route.trimmed.tokens / max(1, shape.n_tokens)
        quorum_sizes = [quorum_size(n_chunks) for n_chunks in self.decomposition.levels]
        return float(math.prod(quorum_sizes))

    def is_all(self, shape: CallShape) -> bool:
        """Whether one head group is the whole call."""
        return self.group == GroupSize(shape.batch, shape.kv_heads)

    def task_rows(self, shape: CallShape) -> tuple[int, int]:
        """Query rows and key rows of the largest task that a kernel gets."""
        return self.route.task_rows(self.decomposition, shape)

    def n_query_heads(self, shape: CallShape) -> int:
        """Query heads of a head group, of all its batch entries together."""
        return self.group.batch * self.group.kv_heads * shape.queries_per_key_head

    def extent(self, shape: CallShape) -> Extent:
        """The sizes of the largest task that a kernel gets."""
        return Extent(
            batch=self.group.batch,
            query_heads=self.group.kv_heads * shape.queries_per_key_head,
            key_heads=self.group.kv_heads,
            n_tokens=max(self.task_rows(shape)),
            max_queries=self.max_queries,
            max_keys=self.max_keys,
        )

    def runs(self, problem: Problem) -> bool:
        """Whether its route can run the pass ``problem``."""
        return self.route.runs(self, problem)

    def as_runnable(self, problem: Problem, **changes: Any) -> Schedule:
        """Itself, or the same through slots, with ``changes`` to their fields,
        if its route cannot run the pass ``problem``."""
        if self.runs(problem):
            return self
        return self.through_slots(problem.shape, **changes)

    def through_slots(self, shape: CallShape, **changes: Any) -> Schedule:
        """The schedule through slots that replaces this one, with ``changes`` to the
        fields of its slots."""
        route = self.route.slots(**changes)
        return schedule_of(
            shape,
            self.route.slots_decomposition(self.decomposition),
            self.group,
            route,
            pinned=self.pinned,
        )

    def changed(self, **changes: Any) -> Schedule:
        """The same through slots with ``changes`` to their fields; rectangle limits
        stay."""
        return replace(self, route=self.route.slots(**changes))

    def deeper(self, shape: CallShape) -> Schedule:
        """One level more, through slots, with rectangle limits to match."""
        deeper = self.decomposition.deeper(DEEPEN_BY)
        schedule = replace(self, decomposition=deeper)
        return schedule.through_slots(shape, trimmed=None)


def schedule_of(
    shape: CallShape,
    decomposition: Decomposition,
    group: GroupSize,
    route: Route,
    *,
    pinned: bool = False,
    max_pairs: int | None = None,
) -> Schedule:
    """A schedule with rectangle limits that fit its tasks.

    ``max_pairs`` bounds queries x keys of a rectangle, for a mask with both dimensions.
    The longer side is halved until the limits are within it.
    """
    unit = cut_unit(decomposition)
    max_queries, max_keys = route.limits(decomposition, shape)
    max_queries = max(1, max_queries)
    max_keys = max(1, max_keys)
    while max_pairs is not None and max_queries * max_keys > max_pairs:
        if max_queries >= max_keys:
            max_queries = _half(max_queries, unit)
        else:
            max_keys = _half(max_keys, unit)
    return Schedule(
        decomposition,
        group,
        route,
        max_queries,
        max_keys,
        pinned,
    )


def cut_unit(decomposition: Decomposition) -> int:
    """Chunks, and rectangles of tasks, are cut at multiples of this many tokens."""
    return decomposition.tile if decomposition.layout == "aligned" else 1


def _half(side: int, unit: int) -> int:
    """Half of a rectangle's side: a multiple of ``unit`` where the side is longer."""
    if side > unit:
        return round_up(ceil_div(side, 2), unit)
    return max(1, side // 2)
