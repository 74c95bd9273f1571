"""A schedule: how a pass is decomposed into tasks and head groups, and the route it runs by."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

from quorum_attention.decomposition import Decomposition, Pairs, Task
from quorum_attention.decomposition.decomposition import tokens_of
from quorum_attention.decomposition.trimming import restricted, trimmed
from quorum_attention.execution.call import Job, Tools
from quorum_attention.execution.control.controller import RecoveryController
from quorum_attention.execution.device.residency import Home
from quorum_attention.execution.problem import (
    Footprint,
    Group,
    GroupSize,
    Problem,
    WorkCounts,
    groups,
)
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.protocol import CallShape, Extent, InnerKernel, Lengths
from quorum_attention.quorums import quorum_size
from quorum_attention.sizes import counted

# See ``Route.run``.
Attempt = Callable[["Schedule", RecoveryController, Tools], Iterator[int]]

# Chunks of each level that a recovery adds.
DEEPEN_BY = 7


@dataclass(frozen=True, slots=True)
class Tally:
    """The sizes of the trimmed tasks of a head group.

    Attributes:
        n_tasks: how many tasks are left.
        tokens: of all tasks together.
        largest: tokens of the largest task.
        before: tokens of all tasks together without trimming.
    """

    n_tasks: int
    tokens: int
    largest: int
    before: int

    @property
    def left_out(self) -> float:
        """The share of tokens that was trimmed."""
        return 1.0 - self.tokens / self.before if self.before else 0.0


@dataclass(frozen=True, slots=True)
class Route(ABC):
    """How a pass runs; each route is a subclass (execution/routes).

    Attributes:
        measured: whether the report measures its stages.
        whole_groups: whether its units are whole head groups, so that a failed group begins anew.
        recovery: what failed where ``fallback`` is taken, and what is done instead, in words.
        n_cap: slots, i.e. tasks resident at once.
        accumulator: where the state lives between the visits of a task.
        streams: kernel calls of a task in flight at once.
        trimmed: sizes of the trimmed tasks; None: they are not trimmed, or it is not known.
    """

    measured: ClassVar[bool] = True
    whole_groups: ClassVar[bool] = True
    recovery: ClassVar[tuple[str, str]] = "", ""

    n_cap: int = 1
    accumulator: Home = "device"
    streams: int = 1
    trimmed: Tally | None = None

    @property
    def accumulators(self) -> str:
        """The home of the state, for reports: "device", "host", or "none"."""
        return self.accumulator

    @property
    @abstractmethod
    def words(self) -> str:
        """The route in words, for people."""

    def parts(self, schedule: Schedule, work: CallShape) -> str:
        """What a head group is computed in, in words."""
        return counted(schedule.n_tasks, "task")

    def task_rows(self, shape: Decomposition, work: CallShape) -> tuple[int, int]:
        """Query rows and key rows of the largest task that a kernel gets."""
        return work.n_queries, work.n_keys

    @abstractmethod
    def limits(self, shape: Decomposition, work: CallShape) -> tuple[int, int]:
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

    def fallback(self, schedule: Schedule, work: CallShape) -> Schedule:
        """The schedule, through slots, to continue with when memory runs out for whole groups."""
        return schedule.through_slots(work)

    def groups(self, job: Job, schedule: Schedule) -> list[Group]:
        """The head groups it computes, in order."""
        return list(groups(job.work, schedule.group))

    def opened(self, job: Job, schedule: Schedule) -> AbstractContextManager[Attempt]:
        """What all attempts of a pass share; gives a function that makes one."""
        return nullcontext(partial(self.run, job))

    def run(
        self, job: Job, schedule: Schedule, controller: RecoveryController, tools: Tools
    ) -> Iterator[int]:
        """One attempt: run the units that the controller has left. Yields, each time that some are
        done, how many."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one pass of one call runs; made by ``schedule_of``.

    Attributes:
        decomposition: of the tokens into tasks.
        group: batch entries and key/value heads of a unit.
        route: how the pass runs.
        max_queries, max_keys: limits of every rectangle, which bound a kernel's workspace.
        pinned: whether the user chose the depth; failures are then reported, not recovered from.
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
    def left_out(self) -> float:
        """The share of tokens that is trimmed from the tasks."""
        return 0.0 if self.route.trimmed is None else self.route.trimmed.left_out

    @property
    def largest_task(self) -> int:
        """Tokens of the largest task."""
        trimmed = self.route.trimmed
        return self.decomposition.max_task_tokens if trimmed is None else trimmed.largest

    @property
    def n_tasks(self) -> int:
        """Tasks of one head group."""
        trimmed = self.route.trimmed
        return self.decomposition.n_tasks if trimmed is None else trimmed.n_tasks

    def visits(self, work: CallShape) -> float:
        """How many tasks hold a row, on average."""
        if self.route.trimmed is not None:
            return self.route.trimmed.tokens / max(1, work.n_tokens)
        return float(math.prod(quorum_size(c) for c in self.decomposition.levels))

    def is_all(self, work: CallShape) -> bool:
        """Whether one head group is the whole call."""
        return self.group == GroupSize(work.batch, work.kv_heads)

    def task_rows(self, work: CallShape) -> tuple[int, int]:
        """Query rows and key rows of the largest task that a kernel gets."""
        return self.route.task_rows(self.decomposition, work)

    def lanes(self, work: CallShape) -> int:
        """Query heads of a head group, of all its batch entries together."""
        return self.group.batch * self.group.kv_heads * work.queries_per_key_head

    def extent(self, work: CallShape) -> Extent:
        """The sizes of the largest task that a kernel gets."""
        return Extent(
            batch=self.group.batch,
            query_heads=self.group.kv_heads * work.queries_per_key_head,
            key_heads=self.group.kv_heads,
            n_tokens=max(self.task_rows(work)),
            max_queries=self.max_queries,
            max_keys=self.max_keys,
        )

    def runs(self, problem: Problem) -> bool:
        """Whether its route can run the pass ``problem``."""
        return self.route.runs(self, problem)

    def through_slots(self, work: CallShape, **changes: Any) -> Schedule:
        """The same decomposition through slots, with ``changes`` to their fields."""
        route = self.route.slots(**changes)
        return schedule_of(work, self.decomposition, self.group, route, pinned=self.pinned)

    def changed(self, **changes: Any) -> Schedule:
        """The same through slots with ``changes`` to their fields; rectangle limits stay."""
        return replace(self, route=self.route.slots(**changes))

    def deeper(self, work: CallShape) -> Schedule:
        """One level more, through slots, with rectangle limits to match."""
        deeper = self.decomposition.deeper(DEEPEN_BY)
        route = self.route.slots(trimmed=None)
        return schedule_of(work, deeper, self.group, route, pinned=self.pinned)


def schedule_of(
    work: CallShape,
    shape: Decomposition,
    group: GroupSize,
    route: Route,
    *,
    pinned: bool = False,
    max_pairs: int | None = None,
) -> Schedule:
    """A schedule with rectangle limits that fit its tasks.

    ``max_pairs`` bounds queries x keys of a rectangle, for a mask with both dimensions. The longer
    side is halved until the limits are within it.
    """
    unit = shape.tile if shape.layout == "aligned" else 1
    queries, keys = (max(1, limit) for limit in route.limits(shape, work))
    while max_pairs is not None and queries * keys > max_pairs and max(queries, keys) > 1:
        if queries >= keys:
            queries = max(1, -(-queries // 2 // unit) * unit if queries > unit else queries // 2)
        else:
            keys = max(1, -(-keys // 2 // unit) * unit if keys > unit else keys // 2)
    return Schedule(shape, group, route, queries, keys, pinned)


# --- Trimmed tasks: without the tokens that have no partner under the call's mask ----------------


def trim(shape: Decomposition, pairs: Pairs, backward: bool) -> tuple[tuple[Task, ...], Tally]:
    """The trimmed tasks, in order, and their sizes."""
    tasks = list(shape.tasks())
    found = trimmed(tasks, pairs, shape.tile, _written(pairs, backward)) if shape.depth else tasks
    lengths = [task.n_tokens for task in found]
    before = sum(task.n_tokens for task in tasks)
    return tuple(found), Tally(len(found), sum(lengths), max(lengths, default=0), before)


# A small cache, because thousands of tasks take some megabytes.
@remembered(8)
def trimmed_tasks(
    shape: Decomposition, lengths: Lengths, kernel: InnerKernel, backward: bool
) -> tuple[tuple[Task, ...], Tally]:
    """``trim``, remembered as long as the kernel lives."""
    return trim(shape, kernel.kept_pairs(*lengths), backward)


@remembered(256)
def tally(shape: Decomposition, lengths: Lengths, kernel: InnerKernel, backward: bool) -> Tally:
    """The sizes of ``trimmed_tasks``, for plans that keep no tasks."""
    return trim(shape, kernel.kept_pairs(*lengths), backward)[1]


def _written(pairs: Pairs, backward: bool) -> int:
    """The end of the positions whose rows the pass returns."""
    return max(pairs.n_queries, pairs.n_keys) if backward else pairs.n_queries


class Cutting:
    """The tasks of one pass of a call, at the depth it was planned for and deeper."""

    def __init__(self, planned: Schedule, problem: Problem) -> None:
        self.planned, self.problem, self.work = planned, problem, problem.work
        self.depth, self.n_cap = planned.decomposition.depth, planned.route.n_cap
        self.pairs = problem.pairs
        self._tasks: dict[int, list[Task]] = {}
        self._schedules: dict[int, Schedule] = {}

    @property
    def deepest(self) -> int:
        """The depth at which tasks are about as small as a tile; deeper ones are no smaller."""
        return deepest(self.planned.decomposition)

    def tasks(self, depth: int) -> list[Task]:
        """All tasks of ``depth``, in order."""
        if depth not in self._tasks:
            deepens = depth > self.planned.decomposition.depth
            schedule = self.schedule(depth - 1).deeper(self.work) if deepens else self.planned
            shape = schedule.decomposition
            tasks: Iterable[Task] = shape.tasks()
            sizes = None
            if not self.pairs.every_token_meets:
                kernel, backward = self.problem.kernel, self.problem.spec.backward
                tasks, sizes = trimmed_tasks(shape, self.work.lengths, kernel, backward)
            self._tasks[depth] = list(tasks)
            self._schedules[depth] = schedule.changed(trimmed=sizes)
        return self._tasks[depth]

    def schedule(self, depth: int) -> Schedule:
        """A schedule whose slots hold every task of ``depth`` that has been asked for."""
        self.tasks(depth)
        return self._schedules[depth]

    def further(self, tasks: Sequence[Task], depth: int) -> list[Task]:
        """The tasks of ``depth`` that ``tasks``, of one level less, are cut into, in order."""
        schedule = self.schedule(depth)
        shape = schedule.decomposition
        found: list[Task] = []
        for task in tasks:
            children = [shape.task((*task.path, i)) for i in range(DEEPEN_BY)]
            if not self.pairs.every_token_meets:
                # Tokens that were trimmed from a task stay out of its children: other tasks hold
                # the state of their rows, or have finished it.
                within = tokens_of(task)
                children = [restricted(child, within) for child in children]
                end = _written(self.pairs, self.problem.spec.backward)
                children = trimmed(children, self.pairs, shape.tile, end)
            found += children
        less = schedule.route.trimmed
        if less is not None:
            largest = max((task.n_tokens for task in found), default=less.largest)
            less = replace(less, largest=max(less.largest, largest))
            self._schedules[depth] = schedule.changed(trimmed=less)
        return found


@lru_cache(maxsize=256)
def deepest(shape: Decomposition) -> int:
    """The depth at which tasks of ``shape``, cut further, are about as small as a tile."""
    smallest = shape.tile if shape.layout == "aligned" else 1
    deeper = shape
    while deeper.max_task_tokens > 2 * smallest:
        finer = deeper.deeper(DEEPEN_BY)
        if finer.max_task_tokens >= deeper.max_task_tokens:
            break
        deeper = finer
    return deeper.depth
