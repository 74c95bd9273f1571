"""Tasks without the tokens that take part in nothing.

A task holds some chunks because their pairs are its own. Under a mask that keeps few pairs (a
sliding window, packed documents), or with fewer queries than keys, most of those tokens have no
partner there: in a window a task needs the chunk that it owns and the edges of its neighbours.
A task is its spans, so leaving such tokens out changes no pair that is kept, and they are neither
copied nor merged. A token that no task needs stays in the first that has it where its row is a
result: it is written all the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from quorum_attention.decomposition.pairs import Pairs, Ranges
from quorum_attention.decomposition.tasks import Span, Task
from quorum_attention.decomposition.verdicts import CLEAR, MASKED

# A task is looked at in about so many cells of tokens.
_CELLS = 64
# Tokens left out between two that are needed are worth a copy of their own only from here on.
_WORTH_A_CUT = 512
# A task that would keep more than this share of its tokens stays as it is.
_MOST_KEPT = 0.95

_Interval = tuple[int, int]
_Node = tuple[int, int, int, int]


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
    held, every = _below(_positions(found), end), _below(_positions(tasks), end)
    for index, task in enumerate(tasks):
        if held == every:
            break
        rest = _without(_below(tokens_of(task), end), held)
        if rest:
            found[index] = restricted(task, _union([*tokens_of(found[index]), *rest]))
            held = _union([*held, *rest])
    return [task for task in found if task.spans]


def restricted(task: Task, ranges: Sequence[_Interval]) -> Task:
    """``task`` with its tokens within ``ranges`` alone (ascending, disjoint)."""
    starts = [start for start, _ in ranges]
    spans = []
    for span in task.spans:
        for start, stop in ranges[max(0, bisect_right(starts, span.start) - 1) :]:
            if start >= span.stop:
                break
            low, high = max(start, span.start), min(stop, span.stop)
            if low < high:
                spans.append(replace(span, start=low, stop=high))
    if tuple(spans) == task.spans:
        return task
    return Task(task.path, tuple(spans))


def tokens_of(task: Task) -> list[_Interval]:
    """The positions of a task's tokens, ascending and disjoint."""
    return [(start, stop) for start, stop, _ in task.runs]


def _positions(tasks: Iterable[Task]) -> list[_Interval]:
    return _union(run for task in tasks for run in tokens_of(task))


def _below(intervals: Iterable[_Interval], end: int) -> list[_Interval]:
    return [(start, min(stop, end)) for start, stop in intervals if start < end]


def _needed(task: Task, pairs: Pairs, tile: int) -> list[_Interval]:
    """Positions with a kept pair in ``task``, and few without."""
    if not task.spans:
        return []
    cell = tile * max(1, task.n_tokens // (_CELLS * tile))
    marks = _Marks(cell)
    for query, key in _span_pairs(task.spans, pairs, marks):
        _mark(query, key, pairs, marks)
    found: list[_Interval] = []
    for start, stop in marks.intervals():
        if found and start - found[-1][1] < _WORTH_A_CUT:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


class _Marks:
    """Cells of the sequence that a query or a key of a kept pair lies in: bits."""

    def __init__(self, cell: int) -> None:
        self.cell = cell
        self.marked = 0

    def of(self, intervals: Iterable[_Interval]) -> int:
        """The cells of some positions."""
        found = 0
        for start, stop in intervals:
            first = start // self.cell
            found |= ((1 << (stop - 1) // self.cell + 1 - first) - 1) << first
        return found

    def have(self, cells: int) -> bool:
        """Whether nothing of these cells is left to mark."""
        return not cells & ~self.marked

    def intervals(self) -> Iterator[_Interval]:
        """The marked positions, in whole cells."""
        marked, at = self.marked, 0
        while marked:
            skip = (marked & -marked).bit_length() - 1
            marked >>= skip
            length = (~marked & (marked + 1)).bit_length() - 1
            marked >>= length
            at += skip + length
            yield (at - length) * self.cell, at * self.cell


def _span_pairs(
    spans: tuple[Span, ...], pairs: Pairs, marks: _Marks
) -> Iterator[tuple[Span, Span]]:
    """Pairs of spans that may keep something, by halves of halves."""
    nodes: list[_Node] = [(0, len(spans), 0, len(spans))]
    while nodes:
        q0, q1, k0, k1 = nodes.pop()
        first, last = spans[q0], spans[q1 - 1]
        left, right = spans[k0], spans[k1 - 1]
        if pairs.of(Ranges.of(first.start, last.stop, left.start, right.stop)) is MASKED:
            continue
        if q1 - q0 == 1 and k1 - k0 == 1:
            if first.bits & left.bits == 0:
                yield first, left
            continue
        if not marks.have(marks.of(_intervals((*spans[q0:q1], *spans[k0:k1])))):
            nodes += _quarters(q0, q1, k0, k1, 1)


def _intervals(spans: Iterable[Span]) -> Iterator[_Interval]:
    return ((span.start, span.stop) for span in spans)


def _mark(query: Span, key: Span, pairs: Pairs, marks: _Marks) -> None:
    nodes: list[_Node] = [(query.start, query.stop, key.start, key.stop)]
    while nodes:
        q0, q1, k0, k1 = nodes.pop()
        cells = marks.of(((q0, q1), (k0, k1)))
        if marks.have(cells):
            continue
        verdict = pairs.of(Ranges.of(q0, q1, k0, k1))
        if verdict is MASKED:
            continue
        parts = _quarters(q0, q1, k0, k1, marks.cell)
        if verdict is CLEAR or len(parts) == 1:
            marks.marked |= cells
        else:
            nodes += parts


def _quarters(q0: int, q1: int, k0: int, k1: int, unit: int) -> list[_Node]:
    """A block cut in the middle of both sides, at multiples of ``unit``; where neither side
    reaches across one, the block itself."""
    rows, columns = _halves(q0, q1, unit), _halves(k0, k1, unit)
    return [(*row, *column) for row in rows for column in columns]


def _halves(start: int, stop: int, unit: int) -> list[_Interval]:
    first, last = start // unit, (stop - 1) // unit
    if first == last:
        return [(start, stop)]
    middle = (first + last + 1) // 2 * unit
    return [(start, middle), (middle, stop)]


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    joined: list[_Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


def _without(intervals: Sequence[_Interval], others: Sequence[_Interval]) -> list[_Interval]:
    """What of ``intervals`` is in none of ``others`` (both ascending and disjoint)."""
    starts = [start for start, _ in others]
    found = []
    for start, stop in intervals:
        for low, high in others[max(0, bisect_right(starts, start) - 1) :]:
            if low >= stop:
                break
            if high <= start:
                continue
            if low > start:
                found.append((start, low))
            start = max(start, high)
        if start < stop:
            found.append((start, stop))
    return found
