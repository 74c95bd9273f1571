"""Trimmed tasks of a call, remembered: without the tokens that have no partner under
its mask."""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.decomposition import Decomposition, Pairs, Task
from quorum_attention.decomposition.trimming import trimmed
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.call_shape import Lengths
from quorum_attention.kernels.protocol import InnerKernel


@dataclass(frozen=True, slots=True)
class TrimmedSizes:
    """The sizes of the trimmed tasks of a head group.

    Attributes:
        n_tasks: how many tasks are left.
        tokens: of all tasks together.
        largest: tokens of the largest task.
        untrimmed_tokens: tokens of all tasks together without trimming.
    """

    n_tasks: int
    tokens: int
    largest: int
    untrimmed_tokens: int

    @property
    def trimmed_share(self) -> float:
        """The share of tokens that was trimmed."""
        if not self.untrimmed_tokens:
            return 0.0
        return 1.0 - self.tokens / self.untrimmed_tokens


def trim(
    decomposition: Decomposition, pairs: Pairs, backward: bool
) -> tuple[tuple[Task, ...], TrimmedSizes]:
    """The trimmed tasks, in order, and their sizes."""
    tasks = list(decomposition.tasks())
    n_untrimmed = sum(task.n_tokens for task in tasks)
    if decomposition.depth:
        tasks = trimmed(
            tasks,
            pairs,
            decomposition.tile,
            end_of_results(pairs, backward),
        )
    lengths = [task.n_tokens for task in tasks]
    sizes = TrimmedSizes(
        len(tasks),
        sum(lengths),
        max(lengths, default=0),
        n_untrimmed,
    )
    return tuple(tasks), sizes


# A small cache, because thousands of tasks take some megabytes.
@remembered(8)
def trimmed_tasks(
    decomposition: Decomposition, lengths: Lengths, kernel: InnerKernel, backward: bool
) -> tuple[tuple[Task, ...], TrimmedSizes]:
    """``trim``, remembered as long as the kernel lives."""
    return trim(decomposition, kernel.kept_pairs(*lengths), backward)


@remembered(256)
def trimmed_sizes(
    decomposition: Decomposition, lengths: Lengths, kernel: InnerKernel, backward: bool
) -> TrimmedSizes:
    """The sizes of ``trimmed_tasks``, for plans that keep no tasks."""
    return trim(decomposition, kernel.kept_pairs(*lengths), backward)[1]


def end_of_results(pairs: Pairs, backward: bool) -> int:
    """The end of the positions whose rows the pass returns."""
    if not backward:
        return pairs.n_queries
    return max(pairs.n_queries, pairs.n_keys)
