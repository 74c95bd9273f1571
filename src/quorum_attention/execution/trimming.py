"""Trimmed tasks: the tasks of a call without the tokens that have no partner under its mask."""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.decomposition import Decomposition, Pairs, Task
from quorum_attention.decomposition.trimming import trimmed
from quorum_attention.execution.problem import Workload
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.protocol import InnerKernel

Sizes = tuple[int, int, bool]
"""Queries, keys, and whether the call is causal."""


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


def pairs_of(work: Workload, kernel: InnerKernel) -> Pairs:
    """The pairs that a call keeps, by its sizes and the kernel's own mask."""
    return kernel.kept_pairs(*sizes_of(work))


def sizes_of(work: Workload) -> Sizes:
    """What the pairs of a call depend on, beside its kernel."""
    return work.n_queries, work.n_keys, work.is_causal


def _trim(
    shape: Decomposition, sizes: Sizes, kernel: InnerKernel, backward: bool
) -> tuple[tuple[Task, ...], Tally]:
    """The trimmed tasks, in order, and their sizes."""
    tasks, pairs = list(shape.tasks()), kernel.kept_pairs(*sizes)
    found = tasks
    if shape.depth:
        found = trimmed(tasks, pairs, shape.tile, written(pairs, backward))
    lengths = [task.n_tokens for task in found]
    before = sum(task.n_tokens for task in tasks)
    return tuple(found), Tally(len(found), sum(lengths), max(lengths, default=0), before)


# A small cache, because thousands of tasks take some megabytes.
trimmed_tasks = remembered(8)(_trim)
"""``_trim``, remembered as long as the kernel lives."""


@remembered(256)
def tally(shape: Decomposition, sizes: Sizes, kernel: InnerKernel, backward: bool) -> Tally:
    """The sizes of ``trimmed_tasks``, for plans that keep no tasks."""
    return _trim(shape, sizes, kernel, backward)[1]


def written(pairs: Pairs, backward: bool) -> int:
    """The end of the positions whose rows the pass returns."""
    return max(pairs.n_queries, pairs.n_keys) if backward else pairs.n_queries
