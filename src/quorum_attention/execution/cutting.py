"""Which tasks a pass is cut into: trimmed under a mask, else filled up; and cut further later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quorum_attention.decomposition import Task
from quorum_attention.decomposition.trimming import restricted, tokens_of, trimmed
from quorum_attention.execution.padding import filled
from quorum_attention.execution.schedule import DEEPEN_BY, Schedule
from quorum_attention.execution.trimming import pairs_of, trimmed_tasks, written
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.protocol import InnerKernel


class Cutting:
    """The tasks of one pass of a call, at whatever depth.

    A schedule that comes back has slots for the tasks beside it.
    """

    def __init__(self, work: Workload, kernel: InnerKernel, *, backward: bool) -> None:
        self.work, self.kernel, self.backward = work, kernel, backward
        self.pairs = pairs_of(work, kernel)

    def tasks(self, schedule: Schedule) -> tuple[list[Task], Schedule]:
        """The tasks of a schedule, in order."""
        shape = schedule.decomposition
        if self.pairs.every_token_meets:
            return filled(list(shape.tasks()), shape, self.work), replace(schedule, trimmed=None)
        found = trimmed_tasks(shape, self.pairs, self.kernel, self.backward)
        return list(found.tasks), replace(schedule, trimmed=found.tally())

    def further(self, tasks: Sequence[Task], deeper: Schedule) -> tuple[list[Task], Schedule]:
        """What is left of a coarser level, each task cut to the level of ``deeper``."""
        shape = deeper.decomposition
        found: list[Task] = []
        for task in tasks:
            children = [shape.task((*task.path, i)) for i in range(DEEPEN_BY)]
            if not self.pairs.every_token_meets:
                # Of tokens that the task was without, others have the state, or it is finished.
                within = tokens_of(task)
                children = [restricted(child, within) for child in children]
                end = written(self.pairs, self.backward)
                children = trimmed(children, self.pairs, shape.tile, end)
            found += children
        less = deeper.trimmed
        if less is not None:
            largest = max((task.n_tokens for task in found), default=0)
            deeper = replace(deeper, trimmed=replace(less, largest=max(less.largest, largest)))
        return found, deeper
