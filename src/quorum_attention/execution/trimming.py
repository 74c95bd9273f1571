"""The tasks of a call, less the tokens that its kernel's mask leaves without a partner."""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.decomposition import Decomposition, Pairs, Task
from quorum_attention.decomposition.trimming import trimmed
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.protocol import InnerKernel, Sparse
from quorum_attention.kernels.remembered import remembered


@dataclass(frozen=True, slots=True)
class Tally:
    """What trimmed tasks come to.

    Attributes:
        n_tasks: how many are left.
        tokens: of all of them together.
        largest: of the largest.
        before: tokens that the tasks would have had.
    """

    n_tasks: int
    tokens: int
    largest: int
    before: int

    @property
    def left_out(self) -> float:
        """The share of the tokens that was left out."""
        return 1.0 - self.tokens / self.before if self.before else 0.0


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Tasks, trimmed, in order; ``before`` as in ``Tally``."""

    tasks: tuple[Task, ...]
    before: int

    def tally(self) -> Tally:
        """What they come to."""
        sizes = [task.n_tokens for task in self.tasks]
        return Tally(len(sizes), sum(sizes), max(sizes, default=0), self.before)


def pairs_of(work: Workload, kernel: InnerKernel) -> Pairs:
    """The pairs of a call, by its sizes and the kernel's own mask."""
    if isinstance(kernel, Sparse):
        return kernel.kept_pairs(work.n_queries, work.n_keys, work.is_causal)
    return Pairs(work.n_queries, work.n_keys, work.is_causal)


@remembered(64)
def trimmed_tasks(shape: Decomposition, pairs: Pairs, kernel: InnerKernel) -> Trimmed:
    """The tasks that are run; remembered as long as the kernel lives."""
    tasks = list(shape.tasks())
    found = tasks if shape.depth == 0 else trimmed(tasks, pairs, shape.tile)
    return Trimmed(tuple(found), sum(task.n_tokens for task in tasks))
