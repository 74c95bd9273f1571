"""Tasks without the tokens that take part in nothing.

A task holds some chunks because their pairs are its own. Under a mask that keeps few pairs (a
sliding window, packed documents), or with fewer queries than keys, most of those tokens have no
partner there: in a window a task needs the chunk that it owns and the edges of its neighbours.
A task is its spans, so leaving such tokens out changes no pair that is kept, and they are neither
copied nor merged. A token that no task needs stays in the first that has it where its row is a
result: it is written all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quorum_attention.decomposition.intervals import (
    Interval,
    below,
    bits,
    ones,
    union,
    within,
    without,
)
from quorum_attention.decomposition.pairs import Pairs, Ranges
from quorum_attention.decomposition.quadtree import quarters, walk
from quorum_attention.decomposition.tasks import Span, Task, tokens_of
from quorum_attention.decomposition.verdicts import CLEAR, MASKED, MIXED, Verdict

# A task is looked at in about so many cells of tokens.
_CELLS = 64
# Tokens left out between two that are needed are worth a copy of their own only from here on.
_WORTH_A_CUT = 512
# A task that would keep more than this share of its tokens stays as it is.
_MOST_KEPT = 0.95


def trimmed(
    tasks: Sequence[Task], pairs: Pairs, tile: int = 128, written: int | None = None
) -> list[Task]:
    """``tasks`` in their order, less what they do not need, and less those that need nothing.

    Args:
        tile: tasks are cut at multiples of so many tokens.
        written: tokens below this position that ``tasks`` hold are held afterwards as well,
            because their rows are results; None is all.
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
    """``task`` with its tokens within ``ranges`` alone (ascending, disjoint)."""
    spans = tuple(
        Span(start, stop, span.bits)
        for span in task.spans
        for start, stop in within((span.start, span.stop), ranges)
    )
    return task if spans == task.spans else Task(task.path, spans)


def _needed(task: Task, pairs: Pairs, tile: int) -> list[Interval]:
    """Positions with a kept pair in ``task``, and few without."""
    if not task.spans:
        return []
    cell = tile * max(1, task.n_tokens // (_CELLS * tile))
    marks = _Marks(cell)
    for query, key in _span_pairs(task.spans, pairs, marks):
        _mark(query, key, pairs, marks)
    return union(marks.intervals(), gap=_WORTH_A_CUT)


class _Marks:
    """Cells of the sequence that a query or a key of a kept pair lies in: bits."""

    def __init__(self, cell: int) -> None:
        self.cell = cell
        self.marked = 0

    def of(self, intervals: Iterable[tuple[int, int]]) -> int:
        """The cells of some positions."""
        found = 0
        for start, stop in intervals:
            found |= bits(start // self.cell, (stop - 1) // self.cell + 1)
        return found

    def have(self, cells: int) -> bool:
        """Whether nothing of these cells is left to mark."""
        return not cells & ~self.marked

    def intervals(self) -> Iterator[Interval]:
        """The marked positions, in whole cells."""
        return (Interval(a * self.cell, b * self.cell) for a, b in ones(self.marked))


def _span_pairs(
    spans: tuple[Span, ...], pairs: Pairs, marks: _Marks
) -> Iterator[tuple[Span, Span]]:
    """Pairs of spans that may keep something that is not marked yet."""

    def verdict(block: Ranges) -> Verdict:
        (q0, q1), (k0, k1) = block
        first, left = spans[q0], spans[k0]
        single = q1 - q0 == 1 and k1 - k0 == 1
        if single and first.bits & left.bits:
            return MASKED
        rows, columns = (
            Interval(first.start, spans[q1 - 1].stop),
            Interval(left.start, spans[k1 - 1].stop),
        )
        if pairs.of(Ranges(rows, columns)) is MASKED:
            return MASKED
        if single:
            return CLEAR
        held = ((span.start, span.stop) for span in (*spans[q0:q1], *spans[k0:k1]))
        return MASKED if marks.have(marks.of(held)) else MIXED

    def parts(block: Ranges, found: Verdict) -> list[Ranges]:
        return quarters(block) if found is MIXED else []

    for (queries, keys), found in walk(Ranges.of(0, len(spans), 0, len(spans)), verdict, parts):
        if found is CLEAR:
            yield spans[queries.start], spans[keys.start]


def _mark(query: Span, key: Span, pairs: Pairs, marks: _Marks) -> None:
    def verdict(block: Ranges) -> Verdict:
        return MASKED if marks.have(marks.of(block)) else pairs.of(block)

    def parts(block: Ranges, found: Verdict) -> list[Ranges]:
        return quarters(block, marks.cell) if found is MIXED else []

    for block, found in walk(
        Ranges.of(query.start, query.stop, key.start, key.stop), verdict, parts
    ):
        if found is not MASKED:
            marks.marked |= marks.of(block)
