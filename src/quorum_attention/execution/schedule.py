"""What an execution needs to be told: the decomposition, the cuts, the slots, the residency."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.padding import task_rows
from quorum_attention.execution.trimming import Tally
from quorum_attention.execution.workload import GroupSize, Workload
from quorum_attention.kernels.protocol import Extent

Home = Literal["device", "host"]

# A finer level than the plan's is cut by the smallest quorum set that divides anything.
DEEPEN_BY = 7


@dataclass(frozen=True, slots=True)
class Schedule:
    """Orders for one pass of one call.

    Attributes:
        decomposition: tokens into tasks.
        group: batch entries and heads of a unit of work.
        n_cap: slots, i.e. tasks resident at once.
        accumulator: where the travelling state lives between visits.
        max_queries, max_keys: no rectangle is larger, so a kernel's workspace has a bound.
        sweep: on the inputs as they lie, all tasks of a head group at once (routes/together.py).
        one_by_one: of a sweep, the tasks one after the other (routes/in_place.py).
        streams: kernel calls of a task in flight at once.
        pinned: the user chose the depth; a failure is reported, not recovered from.
        trimmed: what the tasks come to without tokens that a mask leaves alone; None is not known,
            or nothing to leave out.
    """

    decomposition: Decomposition
    group: GroupSize
    n_cap: int
    accumulator: Home
    max_queries: int
    max_keys: int
    pinned: bool = False
    streams: int = 1
    sweep: bool = False
    one_by_one: bool = False
    trimmed: Tally | None = None

    def task_rows(self, work: Workload) -> tuple[int, int]:
        """Rows of queries and of keys of the largest task that a kernel sees."""
        tokens = work.n_tokens
        if self.trimmed is not None and (self.one_by_one or not self.sweep):
            tokens = self.trimmed.widest if self.one_by_one else self.trimmed.largest
        elif not self.sweep:
            return task_rows(self.decomposition, work)
        return min(tokens, work.n_queries), min(tokens, work.n_keys)

    @property
    def largest_task(self) -> int:
        """Tokens of the largest task, however it is run."""
        return self.decomposition.max_task_tokens if self.trimmed is None else self.trimmed.largest

    @property
    def n_tasks(self) -> int:
        """Tasks of one head group."""
        return self.decomposition.n_tasks if self.trimmed is None else self.trimmed.n_tasks

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

    def deeper(self, work: Workload) -> Schedule:
        """One level more, with rectangles to match."""
        deeper = self.decomposition.deeper(DEEPEN_BY)
        return with_limits(replace(self, decomposition=deeper, trimmed=None), work)


def through_slots(schedule: Schedule, work: Workload) -> Schedule:
    """What is left to do where a sweep cannot be: its tasks through a slot."""
    return with_limits(replace(schedule, n_cap=1, sweep=False, one_by_one=False), work)


def with_limits(schedule: Schedule, work: Workload, max_pairs: int | None = None) -> Schedule:
    """``schedule`` with rectangle limits that fit its tasks.

    Halving a task's tokens gives rectangles of at most half of them on each side, up to a chunk;
    a monolithic task is one rectangle. ``max_pairs`` bounds rows x columns (for a mask that spans
    both), by halving whichever side is longer.
    """
    shape = schedule.decomposition
    if schedule.sweep:
        rectangles = shape.whole().rectangles(work.is_causal, work.n_queries, work.n_keys)
        return replace(
            schedule,
            max_queries=max((r.n_queries for r in rectangles), default=1),
            max_keys=max((r.n_keys for r in rectangles), default=1),
        )
    rows = schedule.task_rows(work)
    tokens = max(task_rows(shape, work))
    unit = shape.tile if shape.layout == "aligned" else 1
    if shape.depth == 0:
        queries, keys = work.n_queries, work.n_keys
    else:
        from quorum_attention.quorums import quorum_size

        # The larger half of l chunks: an odd number of chunks does not halve evenly.
        chunks = quorum_size(shape.levels[-1])
        half = -(-tokens * -(-chunks // 2) // chunks)
        half = -(-half // unit) * unit
        queries, keys = (min(half, limit) for limit in rows)
    queries, keys = max(queries, 1), max(keys, 1)
    while max_pairs is not None and queries * keys > max_pairs and max(queries, keys) > 1:
        if queries >= keys:
            queries = max(1, -(-queries // 2 // unit) * unit if queries > unit else queries // 2)
        else:
            keys = max(1, -(-keys // 2 // unit) * unit if keys > unit else keys // 2)
    return replace(schedule, max_queries=queries, max_keys=keys)
