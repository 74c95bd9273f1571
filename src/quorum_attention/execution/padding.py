"""One treatment of the ragged end: every task of a level the same shape.

Chunks are equal but for the last, so the few tasks that hold it have shapes of their own, and a
vendor kernel prepares every shape it has not seen for 40 ms or more. Under causal masking the last
chunk can be filled up instead: keys after the end are seen by queries after the end alone, and
those, all zeros, add nothing to any gradient and are stored nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.execution.workload import Workload
from quorum_attention.quorums import quorum_size

# More than this share of rows that count for nothing is not worth it.
_MOST_PADDING = 1 / 32


def filled(tasks: Sequence[Task], shape: Decomposition, work: Workload) -> list[Task]:
    """``tasks`` of a decomposition, the last chunk filled up where that changes nothing."""
    end = _filled_end(shape, work)
    return list(tasks) if end is None else [_filled(task, work.n_tokens, end) for task in tasks]


def task_rows(shape: Decomposition, work: Workload) -> tuple[int, int]:
    """Most rows of queries, and of keys, that a task of ``shape`` has, filled up or not.

    Whatever is reckoned by the size of a task asks here: slots, workspaces, limits of rectangles.
    """
    end = _filled_end(shape, work)
    if end is None:
        tokens = shape.max_task_tokens
        return min(tokens, work.n_queries), min(tokens, work.n_keys)
    # A filled chunk is a whole one, so a task that has it may be longer than the sequence.
    tokens = min(end, quorum_size(shape.levels[0]) * shape.chunk_tokens)
    return tokens, tokens


def is_filled(task: Task, work: Workload) -> bool:
    """Whether a task reaches beyond the sequence."""
    return bool(task.spans) and task.spans[-1].stop > work.n_tokens


def _filled_end(shape: Decomposition, work: Workload) -> int | None:
    if shape.depth != 1 or shape.layout != "aligned" or not work.is_causal:
        return None
    if work.mask is not None or work.n_queries != work.n_keys:
        return None
    # Aligned chunks may leave whole ones empty at the end: only the last that holds any is filled.
    end = -(-work.n_tokens // shape.chunk_tokens) * shape.chunk_tokens
    return end if 0 < end - work.n_tokens <= work.n_tokens * _MOST_PADDING else None


def _filled(task: Task, n_tokens: int, end: int) -> Task:
    # Of a short sequence in whole tiles most chunks are empty, and so are tasks of those alone.
    if not task.spans or task.spans[-1].stop < n_tokens:
        return task
    last = task.spans[-1]
    return Task(task.path, (*task.spans[:-1], replace(last, stop=end)))
