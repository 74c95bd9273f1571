"""Trimmed tasks: the tasks of a call without the tokens that have no partner under its mask.

Fills up the last chunk, so that every task of a level has the same shape.

All chunks have the same length except the last, so the few tasks that hold it have other shapes,
and a vendor kernel takes 40 ms or more to prepare for a new shape. Under causal masking the last
chunk can be filled up beyond the end of the sequence. Only queries beyond the end see keys there.
The results of those queries are not stored, and their upstream gradient is zero, so they add
nothing to any gradient: zero times a probability.

That probability has to be finite. A query of zeros would have a score of NaN with an infinite key,
to which real queries may give -inf. So rows beyond the end repeat the last real query, key and
log-sum-exp: whatever is finite for that query, which sees all that they see, is finite for them.
Their values are zero, which no probability of zero turns into NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quorum_attention.decomposition import Decomposition, Pairs, Task
from quorum_attention.decomposition.trimming import trimmed
from quorum_attention.execution.problem import Workload
from quorum_attention.kernels.cache import remembered
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.quorums import quorum_size

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


# Most rows that are filled up, as a share of the sequence.
_MOST_PADDING = 1 / 32


def filled(tasks: Sequence[Task], shape: Decomposition, work: Workload) -> list[Task]:
    """``tasks`` of ``shape``, with the last chunk filled up if that leaves the results the same."""
    end = _filled_end(shape, work)
    return list(tasks) if end is None else [_filled(task, work.n_tokens, end) for task in tasks]


def task_rows(shape: Decomposition, work: Workload) -> tuple[int, int]:
    """Most query rows and key rows of a task of ``shape``, filled up or not.

    Slots, workspaces and the limits of rectangles are sized by these.
    """
    end = _filled_end(shape, work)
    if end is None:
        tokens = shape.max_task_tokens
        return min(tokens, work.n_queries), min(tokens, work.n_keys)
    # With a filled-up chunk a task may be longer than the sequence.
    tokens = min(end, quorum_size(shape.levels[0]) * shape.chunk_tokens)
    return tokens, tokens


def is_filled(task: Task, work: Workload) -> bool:
    """Whether a task reaches beyond the end of the sequence."""
    return bool(task.spans) and task.spans[-1].stop > work.n_tokens


def _filled_end(shape: Decomposition, work: Workload) -> int | None:
    if shape.depth != 1 or shape.layout != "aligned" or not work.is_causal:
        return None
    if work.mask is not None or work.n_queries != work.n_keys or not work.n_tokens:
        return None
    # In the aligned layout the last chunks may be empty: the last one with tokens is filled up.
    end = -(-work.n_tokens // shape.chunk_tokens) * shape.chunk_tokens
    return end if 0 < end - work.n_tokens <= work.n_tokens * _MOST_PADDING else None


def _filled(task: Task, n_tokens: int, end: int) -> Task:
    # In a short sequence most aligned chunks are empty, so a task may have no tokens at all.
    if not task.spans or task.spans[-1].stop < n_tokens:
        return task
    last = task.spans[-1]
    return Task(task.path, (*task.spans[:-1], replace(last, stop=end)))
