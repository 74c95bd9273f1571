"""The tasks that a pass is cut into: trimmed under a mask, else filled up; cut further later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.decomposition.tasks import tokens_of
from quorum_attention.decomposition.trimming import restricted, trimmed
from quorum_attention.execution.padding import filled
from quorum_attention.execution.schedule import DEEPEN_BY, Schedule
from quorum_attention.execution.trimming import pairs_of, trimmed_tasks, written
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.protocol import InnerKernel


class Cutting:
    """The tasks of one pass of a call, at the depth it was planned for and deeper."""

    def __init__(
        self, planned: Schedule, work: Workload, kernel: InnerKernel, *, backward: bool
    ) -> None:
        self.planned, self.work, self.kernel, self.backward = planned, work, kernel, backward
        self.pairs = pairs_of(work, kernel)
        self._tasks: dict[int, list[Task]] = {}
        self._schedules: dict[int, Schedule] = {}

    @property
    def deepest(self) -> int:
        """The depth at which tasks are about as small as a tile; deeper ones are no smaller."""
        return _deepest(self.planned.decomposition)

    def tasks(self, depth: int) -> list[Task]:
        """All tasks of ``depth``, in order."""
        if depth not in self._tasks:
            deepens = depth > self.planned.decomposition.depth
            schedule = self.schedule(depth - 1).deeper(self.work) if deepens else self.planned
            shape = schedule.decomposition
            if self.pairs.every_token_meets:
                self._tasks[depth] = filled(list(shape.tasks()), shape, self.work)
                schedule = schedule.changed(trimmed=None)
            else:
                found = trimmed_tasks(shape, self.pairs, self.kernel, self.backward)
                self._tasks[depth] = list(found.tasks)
                schedule = schedule.changed(trimmed=found.tally())
            self._schedules[depth] = schedule
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
                end = written(self.pairs, self.backward)
                children = trimmed(children, self.pairs, shape.tile, end)
            found += children
        less = schedule.trimmed
        if less is not None:
            largest = max((task.n_tokens for task in found), default=less.largest)
            less = replace(less, largest=max(less.largest, largest))
            self._schedules[depth] = schedule.changed(trimmed=less)
        return found


@lru_cache(maxsize=256)
def _deepest(shape: Decomposition) -> int:
    smallest = shape.tile if shape.layout == "aligned" else 1
    deeper = shape
    while deeper.max_task_tokens > 2 * smallest and deeper.depth < shape.depth + 8:
        finer = deeper.deeper(DEEPEN_BY)
        if finer.max_task_tokens >= deeper.max_task_tokens:
            break
        deeper = finer
    return deeper.depth
