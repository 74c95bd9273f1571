"""The tasks of one pass of a call, at the depth it was planned for and deeper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.decomposition.decomposition import tokens_of
from quorum_attention.decomposition.trimming import restricted, trimmed
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.schedule import DEEPEN_BY, Schedule, cut_unit
from quorum_attention.execution.trimmed_tasks import end_of_results, trimmed_tasks


class TaskLevels:
    """The tasks of one pass of a call, at the depth it was planned for and deeper.

    Attributes:
        planned: the schedule that the pass began with.
        depth, n_cap: of that schedule.
        pairs: the pairs that the call keeps.
    """

    def __init__(self, schedule: Schedule, problem: Problem) -> None:
        self.planned = schedule
        self.problem = problem
        self.shape = problem.shape
        self.depth = schedule.decomposition.depth
        self.n_cap = schedule.route.n_cap
        self.pairs = problem.pairs
        self._tasks: dict[int, list[Task]] = {}
        self._schedules: dict[int, Schedule] = {}

    @property
    def deepest(self) -> int:
        """The depth at which tasks are about as small as a tile; deeper ones are no
        smaller."""
        return deepest(self.planned.decomposition)

    def tasks(self, depth: int) -> list[Task]:
        """All tasks of ``depth``, in the order in which they run: by path."""
        if depth not in self._tasks:
            self._add_level(depth)
        return self._tasks[depth]

    def schedule(self, depth: int) -> Schedule:
        """A schedule whose slots hold every task of ``depth`` that has been asked
        for."""
        if depth not in self._schedules:
            self._add_level(depth)
        return self._schedules[depth]

    def _add_level(self, depth: int) -> None:
        """Make all tasks of ``depth``, and the schedule whose slots hold them."""
        if depth > self.planned.decomposition.depth:
            schedule = self.schedule(depth - 1).deeper(self.shape)
        else:
            schedule = self.planned
        decomposition = schedule.decomposition
        if self.pairs.every_token_meets:
            self._tasks[depth] = list(decomposition.tasks())
            self._schedules[depth] = schedule.changed(trimmed=None)
            return
        problem = self.problem
        tasks, sizes = trimmed_tasks(
            decomposition, problem.shape.lengths, problem.kernel, problem.spec.backward
        )
        self._tasks[depth] = list(tasks)
        self._schedules[depth] = schedule.changed(trimmed=sizes)

    def split_tasks(self, tasks: Sequence[Task], depth: int) -> list[Task]:
        """The tasks of ``depth`` that ``tasks``, of one level less, are cut into, by
        path."""
        schedule = self.schedule(depth)
        children = [child for task in tasks for child in self._children(task, schedule)]
        sizes = schedule.route.trimmed
        if sizes is not None:
            largest = max((child.n_tokens for child in children), default=0)
            sizes = replace(sizes, largest=max(sizes.largest, largest))
            self._schedules[depth] = schedule.changed(trimmed=sizes)
        return children

    def _children(self, task: Task, schedule: Schedule) -> list[Task]:
        """The tasks that one task is cut into, by path."""
        decomposition = schedule.decomposition
        children = [
            decomposition.task((*task.path, owner)) for owner in range(DEEPEN_BY)
        ]
        if self.pairs.every_token_meets:
            return children
        # Tokens that were trimmed from a task stay out of its children: other tasks
        # hold the state of their rows, or have finished it.
        tokens = tokens_of(task)
        children = [restricted(child, tokens) for child in children]
        end = end_of_results(self.pairs, self.problem.spec.backward)
        return trimmed(
            children,
            self.pairs,
            decomposition.tile,
            end,
        )


@lru_cache(maxsize=256)
def deepest(decomposition: Decomposition) -> int:
    """The depth at which tasks, cut further, are about as small as a tile."""
    smallest = cut_unit(decomposition)
    deeper = decomposition
    while deeper.max_task_tokens > 2 * smallest:
        finer = deeper.deeper(DEEPEN_BY)
        if finer.max_task_tokens >= deeper.max_task_tokens:
            break
        deeper = finer
    return deeper.depth
