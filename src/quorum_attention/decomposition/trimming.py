"""Trims tasks: leaves out tokens that have no kept pair in the task.

Under a mask that keeps few pairs (a sliding window, packed documents), or with fewer queries than
keys, most tokens of a task have no kept pair in it. In a window, for example, a task needs only the
chunk that it owns and the edges of that chunk's neighbours. Trimming changes no kept pair, and what
is left out is neither copied nor merged. A token whose row is a result must still be in one task,
because its row has to be written: if no task needs it, it stays in the first task that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from quorum_attention.decomposition.decomposition import Span, Task, tokens_of
from quorum_attention.decomposition.intervals import Interval, below, ones, union, within, without
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
_WORTH_A_CUT = 512
# A task that would keep more than this share of its tokens is not trimmed.
_MOST_KEPT = 0.95


def trimmed(
    tasks: Sequence[Task], pairs: Pairs, tile: int = 128, written: int | None = None
) -> list[Task]:
    """``tasks`` in their order, trimmed; tasks with no tokens left are dropped.

    Args:
        tile: tasks are trimmed at multiples of this many tokens.
        written: rows of tokens below this position are results, so each of these tokens stays in
            at least one task; None is all tokens.
    """
    if pairs.every_token_meets:
        return list(tasks)
    found = []
    for task in tasks:
        less = restricted(task, _needed(task, pairs, tile))
        found.append(task if less.n_tokens > _MOST_KEPT * task.n_tokens else less)
    end = max((task.spans[-1].stop for task in tasks if task.spans), default=0)
    end = end if written is None else min(written, end)
    held, every = below(tokens_of(*found), end), below(tokens_of(*tasks), end)
    for index, task in enumerate(tasks):
        if held == every:
            break
        rest = without(below(tokens_of(task), end), held)
        if rest:
            found[index] = restricted(task, union([*tokens_of(found[index]), *rest]))
            held = union([*held, *rest])
    return [task for task in found if task.spans]


def restricted(task: Task, ranges: Sequence[Interval]) -> Task:
    """``task`` with only those of its tokens that lie in ``ranges`` (ascending, disjoint)."""
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
    marks = _Marks(tile * max(1, task.n_tokens // (_CELLS * tile)))
    for query, key in _span_pairs(task.spans, pairs, marks):
        _mark(query, key, pairs, marks)
    cells = (Interval(a * marks.cell, b * marks.cell) for a, b in ones(marks.marked))
    return union(cells, gap=_WORTH_A_CUT)


@dataclass
class _Marks:
    """The cells of the sequence that hold a query or a key of a kept pair, as bits of a number.

    Attributes:
        cell: tokens of a cell.
        marked: bit i is set if cell i is needed.
    """

    cell: int
    marked: int = 0

    def of(self, intervals: Iterable[tuple[int, int]]) -> int:
        """The cells that ``intervals`` touch, as bits."""
        found = 0
        for start, stop in intervals:
            # All bits from the first one that is touched to the last.
            found |= (2 << (stop - 1) // self.cell) - (1 << start // self.cell)
        return found

    def have(self, intervals: Iterable[tuple[int, int]]) -> bool:
        """Whether all cells of ``intervals`` are marked already."""
        return not self.of(intervals) & ~self.marked


def _span_pairs(
    spans: tuple[Span, ...], pairs: Pairs, marks: _Marks
) -> Iterator[tuple[Span, Span]]:
    """Pairs of spans that may keep pairs of tokens whose cells are not all marked yet.

    The blocks it walks over are intervals of span numbers, not of tokens.
    """

    def verdict(block: Ranges) -> Verdict:
        (q0, q1), (k0, k1) = block
        query, key = spans[q0], spans[k0]
        single = q1 - q0 == 1 and k1 - k0 == 1
        if single and query.bits & key.bits:
            return EMPTY
        tokens = Ranges.of(query.start, spans[q1 - 1].stop, key.start, spans[k1 - 1].stop)
        if pairs.of(tokens) is EMPTY:
            return EMPTY
        if single:
            return FULL
        inside = ((span.start, span.stop) for span in (*spans[q0:q1], *spans[k0:k1]))
        return EMPTY if marks.have(inside) else PARTIAL

    for (queries, keys), found in walk(Ranges.of(0, len(spans), 0, len(spans)), verdict, quarters):
        if found is FULL:
            yield spans[queries.start], spans[keys.start]


def _mark(query: Span, key: Span, pairs: Pairs, marks: _Marks) -> None:
    """Mark the cells of the pairs that ``pairs`` keeps between two spans."""

    def verdict(block: Ranges) -> Verdict:
        return EMPTY if marks.have(block) else pairs.of(block)

    whole = Ranges.of(query.start, query.stop, key.start, key.stop)
    for block, found in walk(whole, verdict, lambda block: quarters(block, marks.cell)):
        if found is not EMPTY:
            marks.marked |= marks.of(block)
