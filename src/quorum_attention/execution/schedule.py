"""What an execution needs to be told: the decomposition, the head groups, and the route."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.case import Case
from quorum_attention.execution.control.machine import Machine
from quorum_attention.execution.device.residency import Home
from quorum_attention.execution.job import Job
from quorum_attention.execution.takes import Bytes, Load
from quorum_attention.execution.tools import Tools
from quorum_attention.execution.trimming import Tally
from quorum_attention.execution.workload import Group, GroupSize, Workload, groups
from quorum_attention.kernels.protocol import Extent
from quorum_attention.quorums import quorum_size

# A finer level than the plan's is cut by the smallest quorum set that divides anything.
DEEPEN_BY = 7


@dataclass(frozen=True, slots=True)
class Fallback:
    """What is left to do where memory ran out.

    Attributes:
        schedule: what to go on with, through slots.
        failed, instead: in words, for the report.
    """

    schedule: Schedule
    failed: str
    instead: str


@dataclass(frozen=True, slots=True)
class Route(ABC):
    """How a pass runs: a class for each way, in a file of its own (execution/routes)."""

    @property
    def n_cap(self) -> int:
        """Slots, i.e. tasks resident at once."""
        return 1

    @property
    def accumulator(self) -> Home:
        """Where the travelling state lives between visits, where it goes through slots."""
        return "device"

    @property
    def accumulators(self) -> str:
        """Where they are, for reports: "device", "host", or "none"."""
        return self.accumulator

    @property
    def streams(self) -> int:
        """Kernel calls of a task in flight at once."""
        return 1

    @property
    def trimmed(self) -> Tally | None:
        """What the tasks come to without tokens that a mask leaves alone; None is not known, or
        nothing to leave out."""
        return None

    @property
    def measured(self) -> bool:
        """Whether its stages are worth measuring."""
        return True

    @property
    def whole_groups(self) -> bool:
        """Whether its units are head groups: it does not go on within one."""
        return True

    @property
    @abstractmethod
    def words(self) -> str:
        """How it runs, for people."""

    @abstractmethod
    def check(self, shape: Decomposition, group: GroupSize) -> None:
        """Refuse a decomposition or a head group that make no sense this way.

        Raises:
            ValueError: says why.
        """

    def task_rows(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """Rows of queries and of keys of the largest task that a kernel sees."""
        return work.n_queries, work.n_keys

    @abstractmethod
    def limits(self, shape: Decomposition, work: Workload) -> tuple[int, int]:
        """Queries and keys of the largest rectangles that its tasks are cut into by themselves."""

    @abstractmethod
    def runs(self, schedule: Schedule, case: Case) -> bool:
        """Whether it can run a pass."""

    @abstractmethod
    def takes(self, schedule: Schedule, case: Case) -> Bytes:
        """Device bytes that it takes at most."""

    @abstractmethod
    def load(self, schedule: Schedule, case: Case) -> Load:
        """What it keeps a machine busy with."""

    @abstractmethod
    def slots(self, **changes: Any) -> Route:
        """The slots that a pass goes through where it cannot run, with other fields."""

    @abstractmethod
    def fallback(self, schedule: Schedule, work: Workload) -> Fallback | None:
        """What to do where memory runs out for whole groups; None where they are cut."""

    def groups(self, job: Job, schedule: Schedule) -> list[Group]:
        """The head groups it computes, in order."""
        return list(groups(job.call.work, schedule.group))

    @abstractmethod
    def run(self, job: Job, schedule: Schedule, machine: Machine, tools: Tools) -> Iterator[int]:
        """Make the results of what the machine has left; yields the units of each head group that
        is done."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Orders for one pass of one call; made by ``schedule_of``.

    Attributes:
        decomposition: tokens into tasks.
        group: batch entries and heads of a unit of work.
        route: how the pass runs.
        max_queries, max_keys: no rectangle is larger, so a kernel's workspace has a bound.
        pinned: the user chose the depth; a failure is reported, not recovered from.

    Raises:
        ValueError: they make no sense together.
    """

    decomposition: Decomposition
    group: GroupSize
    route: Route
    max_queries: int = 1
    max_keys: int = 1
    pinned: bool = False

    def __post_init__(self) -> None:
        if min(self.group.batch, self.group.kv_heads, self.max_queries, self.max_keys) < 1:
            raise ValueError(
                f"a head group of {self.group} in rectangles of {self.max_queries} x "
                f"{self.max_keys} is nothing"
            )
        self.route.check(self.decomposition, self.group)

    @property
    def n_cap(self) -> int:
        """Slots, i.e. tasks resident at once."""
        return self.route.n_cap

    @property
    def accumulator(self) -> Home:
        """Where the travelling state lives between visits."""
        return self.route.accumulator

    @property
    def streams(self) -> int:
        """Kernel calls of a task in flight at once."""
        return self.route.streams

    @property
    def trimmed(self) -> Tally | None:
        """What the tasks come to without tokens that a mask leaves alone."""
        return self.route.trimmed

    @property
    def limits(self) -> tuple[int, int]:
        """Most queries and keys of a rectangle."""
        return self.max_queries, self.max_keys

    @property
    def left_out(self) -> float:
        """The share of the tasks' tokens that is left out."""
        return 0.0 if self.trimmed is None else self.trimmed.left_out

    @property
    def largest_task(self) -> int:
        """Tokens of the largest task, however it is run."""
        return self.decomposition.max_task_tokens if self.trimmed is None else self.trimmed.largest

    @property
    def n_tasks(self) -> int:
        """Tasks of one head group."""
        return self.decomposition.n_tasks if self.trimmed is None else self.trimmed.n_tasks

    def visits(self, work: Workload) -> float:
        """How often a row is in a task, on the average."""
        if self.trimmed is not None:
            return self.trimmed.tokens / max(1, work.n_tokens)
        return float(math.prod(quorum_size(c) for c in self.decomposition.levels))

    def is_all(self, work: Workload) -> bool:
        """Whether a head group is all of the call."""
        return self.group == GroupSize(work.batch, work.kv_heads)

    def task_rows(self, work: Workload) -> tuple[int, int]:
        """Rows of queries and of keys of the largest task that a kernel sees."""
        return self.route.task_rows(self.decomposition, work)

    def extent(self, work: Workload) -> Extent:
        """The largest piece of work a kernel gets."""
        return Extent(
            batch=self.group.batch,
            query_heads=self.group.kv_heads * work.queries_per_key_head,
            key_heads=self.group.kv_heads,
            n_tokens=max(self.task_rows(work)),
            max_queries=self.max_queries,
            max_keys=self.max_keys,
        )

    def runs(self, case: Case) -> bool:
        """Whether a pass can be run this way."""
        return self.route.runs(self, case)

    def through_slots(self, work: Workload, **changes: Any) -> Schedule:
        """The same through slots, with other fields of theirs."""
        route = self.route.slots(**changes)
        return schedule_of(work, self.decomposition, self.group, route, pinned=self.pinned)

    def changed(self, **changes: Any) -> Schedule:
        """The same in slots of other fields, with rectangles as they are."""
        return replace(self, route=self.route.slots(**changes))

    def deeper(self, work: Workload) -> Schedule:
        """One level more through slots, with rectangles to match."""
        deeper = self.decomposition.deeper(DEEPEN_BY)
        route = self.route.slots(trimmed=None)
        return schedule_of(work, deeper, self.group, route, pinned=self.pinned)


def schedule_of(
    work: Workload,
    shape: Decomposition,
    group: GroupSize,
    route: Route,
    *,
    pinned: bool = False,
    max_pairs: int | None = None,
) -> Schedule:
    """A schedule with rectangle limits that fit its tasks.

    ``max_pairs`` bounds rows x columns (for a mask that spans both), by halving whichever side is
    longer.
    """
    unit = shape.tile if shape.layout == "aligned" else 1
    queries, keys = (max(1, limit) for limit in route.limits(shape, work))
    while max_pairs is not None and queries * keys > max_pairs and max(queries, keys) > 1:
        if queries >= keys:
            queries = max(1, -(-queries // 2 // unit) * unit if queries > unit else queries // 2)
        else:
            keys = max(1, -(-keys // 2 // unit) * unit if keys > unit else keys // 2)
    return Schedule(shape, group, route, queries, keys, pinned)
