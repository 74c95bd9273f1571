"""Trims tasks: leaves out tokens that have no kept pair in the task.

Under a mask that keeps few pairs (a sliding window, packed documents), or with fewer
queries than keys, most tokens of a task have no kept pair in it. In a window, for
example, a task needs only the chunk that it owns and the edges of that chunk's
neighbours. Trimming changes no kept pair, and what is left out is neither copied nor
merged. A token whose row is a result must still be in one task, because its row has to
be written: if no task needs it, it stays in the first task that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from quorum_attention.decomposition.decomposition import Span, Task, tokens_of
from quorum_attention.decomposition.intervals import (
    Interval,
    below,
    ones,
    union,
    within,
    without,
)
from quorum_attention.decomposition.pairs import (
    EMPTY,
    FULL,
    PARTIAL,
    Pairs,
    Ranges,
    Verdict,
    quarters,
    walk,
)

# A task is examined in about this many cells of tokens.
_CELLS = 64
# Fewer consecutive tokens than this are not left out: each gap means one more copy.
_MIN_GAP_TOKENS = 512
# A task that would keep more than this share of its tokens is not trimmed.
_MAX_KEPT_SHARE = 0.95


def trimmed(
    tasks: Sequence[Task], pairs: Pairs, tile: int, n_results: int
) -> list[Task]:
    """``tasks`` in their order, trimmed; tasks with no tokens left are dropped.

    Args:
        tile: tasks are trimmed at multiples of this many tokens.
        n_results: rows of tokens below this position are results, so each of these
            tokens stays in at least one task.
    """
    if pairs.every_token_meets:
        return list(tasks)
    trimmed_tasks: list[Task] = []
    for task in tasks:
        smaller = restricted(task, _needed(task, pairs, tile))
        is_worth_it = smaller.n_tokens <= _MAX_KEPT_SHARE * task.n_tokens
        trimmed_tasks.append(smaller if is_worth_it else task)
    ends = [task.spans[-1].stop for task in tasks if task.spans]
    end = min(n_results, max(ends, default=0))
    # Each token whose row is a result must be in a task.
    result_tokens = below(tokens_of(*tasks), end)
    tokens_in_tasks = below(tokens_of(*trimmed_tasks), end)
    for number, task in enumerate(tasks):
        if tokens_in_tasks == result_tokens:
            break
        results_of_task = below(tokens_of(task), end)
        missing = without(results_of_task, tokens_in_tasks)
        if missing:
            tokens = tokens_of(trimmed_tasks[number])
            tokens = union([*tokens, *missing])
            trimmed_tasks[number] = restricted(task, tokens)
            tokens_in_tasks = union([*tokens_in_tasks, *missing])
    return [task for task in trimmed_tasks if task.spans]


def restricted(task: Task, ranges: Sequence[Interval]) -> Task:
    """``task`` with only those of its tokens that lie in ``ranges`` (ascending,
    disjoint)."""
    spans = tuple(
        Span(start, stop, span.bits)
        for span in task.spans
        for start, stop in within((span.start, span.stop), ranges)
    )
    return task if spans == task.spans else Task(task.path, spans)


def _needed(task: Task, pairs: Pairs, tile: int) -> list[Interval]:
    """Intervals that hold every token with a kept pair in ``task``, in whole cells."""
    if not task.spans:
        return []
    tiles_per_cell = max(1, task.n_tokens // (_CELLS * tile))
    cell = tile * tiles_per_cell
    marks = _Marks(cell)
    for query, key in _span_pairs(task.spans, pairs, marks):
        _mark(query, key, pairs, marks)
    intervals: list[Interval] = []
    for first_cell, stop_cell in ones(marks.marked):
        intervals.append(Interval(first_cell * cell, stop_cell * cell))
    return union(intervals, gap=_MIN_GAP_TOKENS)


@dataclass
class _Marks:
    """The cells of the sequence that hold a query or a key of a kept pair, as bits of a
    number.

    Attributes:
        cell: tokens of a cell.
        marked: bit i is set if cell i is needed.
    """

    cell: int
    marked: int = 0

    def cells_of(self, intervals: Iterable[tuple[int, int]]) -> int:
        """The cells that ``intervals`` touch, as bits."""
        bits = 0
        for start, stop in intervals:
            first = start // self.cell
            last = (stop - 1) // self.cell
            # All bits from the first one that is touched to the last.
            bits |= (2 << last) - (1 << first)
        return bits

    def mark(self, intervals: Iterable[tuple[int, int]]) -> None:
        """Mark all cells of ``intervals``."""
        self.marked |= self.cells_of(intervals)

    def have(self, intervals: Iterable[tuple[int, int]]) -> bool:
        """Whether all cells of ``intervals`` are marked already."""
        return not self.cells_of(intervals) & ~self.marked


def _span_pairs(
    spans: tuple[Span, ...], pairs: Pairs, marks: _Marks
) -> Iterator[tuple[Span, Span]]:
    """Pairs of spans that may keep pairs of tokens whose cells are not all marked yet.

    The blocks it walks over are intervals of span numbers, not of tokens.
    """

    def verdict(block: Ranges) -> Verdict:
        queries = spans[block.queries.start : block.queries.stop]
        keys = spans[block.keys.start : block.keys.stop]
        first_query = queries[0]
        first_key = keys[0]
        is_one_pair = len(queries) == len(keys) == 1
        if is_one_pair and first_query.bits & first_key.bits:
            return EMPTY
        positions = Ranges(
            Interval(first_query.start, queries[-1].stop),
            Interval(first_key.start, keys[-1].stop),
        )
        if pairs.verdict_of(positions) is EMPTY:
            return EMPTY
        if is_one_pair:
            return FULL
        intervals = ((span.start, span.stop) for span in (*queries, *keys))
        return EMPTY if marks.have(intervals) else PARTIAL

    n_spans = len(spans)
    all_spans = Ranges.from_bounds(0, n_spans, 0, n_spans)
    for block, block_verdict in walk(all_spans, verdict, quarters):
        if block_verdict is FULL:
            yield spans[block.queries.start], spans[block.keys.start]


def _mark(query: Span, key: Span, pairs: Pairs, marks: _Marks) -> None:
    """Mark the cells of the pairs that ``pairs`` keeps between two spans."""

    def verdict(block: Ranges) -> Verdict:
        return EMPTY if marks.have(block) else pairs.verdict_of(block)

    all_pairs = Ranges.from_bounds(
        query.start,
        query.stop,
        key.start,
        key.stop,
    )
    cut_at_cells = partial(quarters, unit=marks.cell)
    for block, block_verdict in walk(all_pairs, verdict, cut_at_cells):
        if block_verdict is not EMPTY:
            marks.mark(block)
