"""The route of all tasks at once, over the inputs as they lie.

All tasks of a level together keep every pair once. If the state of a whole head group
fits beside the inputs, the whole sequence is cut into rectangles as a single task would
be. These are fewer and larger than those of the tasks, and are read and merged in
place, so far fewer kernel calls are made.
"""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.decomposition import Decomposition
from quorum_attention.decomposition.layouts import Pieces
from quorum_attention.execution.footprint import (
    Footprint,
    copied_bytes,
    final_bytes,
    result_bytes,
)
from quorum_attention.execution.head_groups import Group, count_groups
from quorum_attention.execution.job import PassJob
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.routes.in_place import (
    InPlace,
    all_rectangles,
    allocated_bytes,
    compute_group,
)
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.work_counts import WorkCounts
from quorum_attention.kernels.call_shape import CallShape


@dataclass(frozen=True, slots=True)
class Blockwise(InPlace):
    """All tasks of a head group, which has one batch entry, as one.

    Attributes:
        pieces: how their rectangles are laid out.
    """

    pieces: Pieces = "halves"

    words = "inputs in place, all tasks of a head group at once"
    recovery = "inputs in place: out of memory", "through slots"

    def limits(self, decomposition: Decomposition, shape: CallShape) -> tuple[int, int]:
        """Halved rectangles are as they come; others have a chunk of queries, or of
        both."""
        if self.pieces == "halves":
            _, rectangles = all_rectangles(shape, decomposition)
            max_queries = max((r.n_queries for r in rectangles), default=1)
            max_keys = max((r.n_keys for r in rectangles), default=1)
            return max_queries, max_keys
        chunk = decomposition.chunk_tokens
        max_queries = min(chunk, shape.n_queries)
        if self.pieces == "blocks":
            return max_queries, min(chunk, shape.n_keys)
        return max_queries, shape.n_keys

    def runs(self, schedule: Schedule, problem: Problem) -> bool:
        """Whether all inputs can be read where they lie. Under a mask only small
        rectangles are of use: each may have a copy of its part of the mask."""
        if problem.shape.bias is not None and self.pieces == "halves":
            return False
        return problem.place.in_place and problem.place.lse_here

    def memory_use(self, schedule: Schedule, problem: Problem) -> Footprint:
        """The states of one head group, the results of all, and the copies of
        inputs."""
        rows = schedule.max_queries if self._is_copied_by_kernel(problem) else None
        states = allocated_bytes(problem, schedule.group)
        copies = copied_bytes(problem, schedule.group, rows)
        rescaled = problem.place.rescaled_grad_bytes or 0
        return Footprint(
            problem.shape.device_type,
            workspace=self.streams * problem.workspace(schedule.extent(problem.shape)),
            accumulators=(*states, *final_bytes(problem)),
            results=(rescaled, *copies, *result_bytes(problem)),
        )

    def _is_copied_by_kernel(self, problem: Problem) -> bool:
        """Whether the kernel copies inputs that operators cannot read, a rectangle at a
        time; if not, a head group's are copied beforehand."""
        return self.pieces != "halves" and problem.kernel.any_upstream

    def work_counts(self, schedule: Schedule, problem: Problem) -> WorkCounts:
        """Each head group is one unit."""
        n_units = count_groups(problem.shape, schedule.group)
        return WorkCounts(units=n_units, pieces=self.pieces)

    def compute(self, job: PassJob, schedule: Schedule, group: Group) -> int:
        """All tasks as one."""
        job.make_results()
        decomposition = schedule.decomposition
        task, rectangles = all_rectangles(job.shape, decomposition, self.pieces)
        tensors = job.task_tensors(
            task,
            rectangles,
            group,
            schedule.limits,
        )
        copies = not self._is_copied_by_kernel(job.problem)
        compute_group(job, tensors, group, copies=copies)
        return decomposition.n_tasks
