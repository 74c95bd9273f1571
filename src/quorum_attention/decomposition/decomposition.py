"""Cuts a sequence into chunks, and chunks into tasks, level by level, without arrays
over tokens.

A task is the tokens of one subsequence, as spans with group bits (paper, section 3.3);
making them is the paper's BuildSubseq.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Literal

from quorum_attention.argument_checks import whole_number
from quorum_attention.arithmetic import ceil_div, round_up
from quorum_attention.decomposition.intervals import Interval, Rows, joined, union
from quorum_attention.decomposition.rectangles import Rectangle, clip, cover, cut
from quorum_attention.quorums import quorum_size
from quorum_attention.quorums.interest import chunks_of_task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Layout = Literal["aligned", "balanced"]


@dataclass(frozen=True, slots=True)
class Span:
    """A maximal run of consecutive tokens of a task with the same group bits.

    Attributes:
        start: position of the first token in the whole sequence.
        stop: position behind the last token.
        bits: one bit for each chunk, at any level, that holds the span and that the
            task does not own. A pair (q, k) is kept if bits[q] & bits[k] == 0.
    """

    start: int
    stop: int
    bits: int

    def continued(self, after: Span) -> Span | None:
        """Join the span and ``after`` if ``after`` comes next and has the same bits;
        else return None."""
        if after.start != self.stop or after.bits != self.bits:
            return None
        return Span(self.start, after.stop, self.bits)


@dataclass(frozen=True)
class Task:
    """One subsequence task. Local positions number its tokens in ascending order from
    0.

    Attributes:
        path: the owned chunk at each level; () for the task that is the whole call.
        spans: ascending, disjoint.
    """

    path: tuple[int, ...]
    spans: tuple[Span, ...]

    @cached_property
    def local_starts(self) -> tuple[int, ...]:
        """Local start of every span, and as the last entry the number of tokens."""
        starts = [0]
        for span in self.spans:
            starts.append(starts[-1] + span.stop - span.start)
        return tuple(starts)

    @property
    def n_tokens(self) -> int:
        """Tokens of the task."""
        return self.local_starts[-1]

    @cached_property
    def runs(self) -> tuple[Rows, ...]:
        """The task's tokens as runs of consecutive positions; a run may have several
        spans."""
        rows = [
            Rows(span.start, span.stop, local)
            for span, local in zip(self.spans, self.local_starts, strict=False)
        ]
        return tuple(joined(rows, Rows.continued))

    def count_below(self, n: int) -> int:
        """The number of tokens at global positions below ``n``; they come first in the
        task."""
        count = 0
        for span in self.spans:
            stop = min(span.stop, n)
            count += max(0, stop - span.start)
        return count

    def between(
        self, local_start: int, local_stop: int, bit: int = 0
    ) -> Iterator[Span]:
        """Yield the parts of the task's spans at the local positions [local_start,
        local_stop), with ``bit`` added to their group bits."""
        starts = self.local_starts
        first = bisect_right(starts, local_start) - 1
        for number in range(first, len(self.spans)):
            span = self.spans[number]
            low = max(local_start, starts[number])
            high = min(local_stop, starts[number + 1])
            if low >= high:
                return
            offset = span.start - starts[number]
            yield Span(
                low + offset,
                high + offset,
                span.bits | bit,
            )

    def segments(self, local_start: int, local_stop: int) -> list[Rows]:
        """The local positions [local_start, local_stop), as runs of consecutive
        tokens."""
        segments: list[Rows] = []
        for start, stop, local in self.runs:
            offset = start - local
            low = max(local, local_start)
            high = min(stop - offset, local_stop)
            if low < high:
                segments.append(Rows(low + offset, high + offset, low))
        return segments

    def contiguous(self, r: Rectangle) -> Iterator[tuple[Rows, Rows, bool]]:
        """Cuts a rectangle into parts whose tokens are consecutive in the whole
        sequence too.

        Yields:
            (queries, keys, causal) of every part. Queries and keys have local and
            global positions.
        """
        columns = self.segments(r.key_start, r.key_stop)
        for queries in self.segments(r.query_start, r.query_stop):
            for keys in columns:
                if not r.causal:
                    yield queries, keys, False
                elif keys.start <= queries.start:
                    yield queries, keys, keys.start == queries.start

    def rectangles(
        self,
        is_causal: bool,
        n_queries: int | None = None,
        n_keys: int | None = None,
        max_queries: int | None = None,
        max_keys: int | None = None,
    ) -> tuple[Rectangle, ...]:
        """Return the kept pairs as plain attention calls, in local positions. Each pair
        is in exactly one call.

        Args:
            is_causal: keep only keys at or before the query (global positions,
                top-left).
            n_queries, n_keys: leave out these global positions and all later ones; None
                is no limit.
            max_queries, max_keys: the largest rectangle allowed; None is no limit.

        Raises:
            TypeError: a count or limit is no whole number.
            ValueError: a count is below 0 or a limit below 1.
        """
        n_tokens = self.n_tokens
        rows = self._count_within(n_queries, "n_queries")
        columns = self._count_within(n_keys, "n_keys")
        height = self._side_limit(max_queries, "max_queries")
        width = self._side_limit(max_keys, "max_keys")
        rectangles = self._cover(bool(is_causal))
        if rows < n_tokens or columns < n_tokens:
            rectangles = tuple(clip(rectangles, rows, columns))
        if height < n_tokens or width < n_tokens:
            rectangles = tuple(cut(rectangles, height, width))
        return rectangles

    def _count_within(self, end: int | None, name: str) -> int:
        """Tokens of the task at global positions below ``end``; None is no limit."""
        if end is None:
            return self.n_tokens
        return self.count_below(whole_number(end, name, 0))

    def _side_limit(self, limit: int | None, name: str) -> int:
        """The longest side that is allowed; None is no limit."""
        if limit is None:
            return max(1, self.n_tokens)
        return whole_number(limit, name, 1)

    def _cover(self, is_causal: bool) -> tuple[Rectangle, ...]:
        """The rectangles without limits, remembered."""
        if is_causal not in self._covers:
            bits = [span.bits for span in self.spans]
            rectangles = cover(self.local_starts, bits, is_causal)
            self._covers[is_causal] = tuple(rectangles)
        return self._covers[is_causal]

    @cached_property
    def _covers(self) -> dict[bool, tuple[Rectangle, ...]]:
        """The rectangles without limits, by ``is_causal``; filled on first use."""
        return {}

    def mask(self) -> NDArray[np.bool_]:
        """The CQS mask over the task's tokens, (n_tokens, n_tokens) bool, True is kept.

        The tensor is dense, so use it for small tasks only. It does not include
        causality.
        """
        import numpy as np

        n_spans = len(self.spans)
        by_span = np.zeros((n_spans, n_spans), dtype=bool)
        for row, query in enumerate(self.spans):
            for column, key in enumerate(self.spans):
                is_kept = query.bits & key.bits == 0
                by_span[row, column] = is_kept
        lengths = [span.stop - span.start for span in self.spans]
        by_query = np.repeat(by_span, lengths, axis=0)
        return np.repeat(by_query, lengths, axis=1)


def tokens_of(*tasks: Task) -> list[Interval]:
    """The global positions of all tokens of ``tasks``."""
    intervals: list[Interval] = []
    for task in tasks:
        intervals += [Interval(start, stop) for start, stop, _ in task.runs]
    return union(intervals)


@dataclass(frozen=True)
class Decomposition:
    """A token sequence cut by cyclic quorum sets, recursively.

    Attributes:
        n_tokens: tokens of the sequence, at positions 0 to n_tokens - 1.
        levels: chunk count of each level, c = l (l - 1) + 1 for a valid quorum size l;
            () is one task, the whole sequence.
        layout: "aligned" cuts at multiples of ``tile``. Its chunks are equal, but the
            last ones may be shorter or empty. "balanced" (the paper's) makes chunks
            that differ by at most one token.
        tile: a number of tokens, for the aligned layout.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that is not allowed.
    """

    n_tokens: int
    levels: tuple[int, ...] = ()
    layout: Layout = "aligned"
    tile: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_tokens", whole_number(self.n_tokens, "n_tokens", 0))
        object.__setattr__(self, "tile", whole_number(self.tile, "tile", 1))
        if self.layout not in ("aligned", "balanced"):
            raise ValueError(
                f"layout must be 'aligned' or 'balanced', got {self.layout!r}"
            )
        if not isinstance(self.levels, tuple):
            raise TypeError(
                f"levels must be a tuple of chunk counts, got {self.levels!r}"
            )
        for c in self.levels:
            quorum_size(c)

    @property
    def depth(self) -> int:
        """Levels of recursion."""
        return len(self.levels)

    @property
    def n_tasks(self) -> int:
        """The number of tasks: the product of the chunk counts."""
        return math.prod(self.levels)

    @property
    def max_task_tokens(self) -> int:
        """An upper bound of the tokens of a task."""
        tokens = self.n_tokens
        for c in self.levels:
            tokens = min(tokens, quorum_size(c) * self._chunk_tokens(tokens, c))
        return tokens

    @property
    def chunk_tokens(self) -> int:
        """The number of tokens of the largest chunk of the first level, at least 1.
        Without levels: of the whole sequence."""
        tokens = self.n_tokens
        if self.levels:
            tokens = min(tokens, self._chunk_tokens(tokens, self.levels[0]))
        return max(1, tokens)

    def _chunk_tokens(self, tokens: int, c: int) -> int:
        """Tokens of the largest chunk where ``tokens`` are cut into ``c``."""
        largest = ceil_div(tokens, c)
        return round_up(largest, self.tile) if self.layout == "aligned" else largest

    def _chunk(self, tokens: int, c: int, number: int) -> Interval:
        """The positions of a chunk where ``tokens`` are cut into ``c``."""
        if self.layout == "aligned":
            size = self._chunk_tokens(tokens, c)
            start = number * size
            return Interval(min(tokens, start), min(tokens, start + size))
        # The first chunks have one token more.
        size, n_longer = divmod(tokens, c)
        start = number * size + min(number, n_longer)
        if number < n_longer:
            size += 1
        return Interval(start, start + size)

    def chunks(self) -> list[Interval]:
        """The positions of the chunks of the first level. Without levels: those of the
        whole sequence."""
        if not self.levels:
            return [Interval(0, self.n_tokens)]
        c = self.levels[0]
        return [self._chunk(self.n_tokens, c, number) for number in range(c)]

    def deeper(self, c: int) -> Decomposition:
        """The decomposition with one more level, of ``c`` chunks."""
        return replace(self, levels=(*self.levels, c))

    def tasks(self) -> Iterator[Task]:
        """All tasks, lazily, in the order of their paths."""
        return map(self.task, product(*map(range, self.levels)))

    def task(self, path: tuple[int, ...]) -> Task:
        """The task named by ``path``, one owner chunk for each level.

        Raises:
            TypeError: ``path`` is not a tuple of whole numbers.
            ValueError: there is no task of that path.
        """
        # (1.0,) and (True,) equal (1,), but must not name the same task in a report.
        if not isinstance(path, tuple) or any(type(owner) is not int for owner in path):
            raise TypeError(f"path must be a tuple of whole numbers, got {path!r}")
        if len(path) != self.depth or not self._has_owners(path):
            raise ValueError(
                f"path must be one owner chunk for each of {self.levels}, got {path}"
            )
        task = Task((), (Span(0, self.n_tokens, 0),) if self.n_tokens else ())
        bit = 1
        for owner, c in zip(path, self.levels, strict=True):
            spans: list[Span] = []
            for number in chunks_of_task(owner, c):
                chunk = self._chunk(task.n_tokens, c, number)
                if number == owner:
                    spans += task.between(*chunk)
                else:
                    spans += task.between(*chunk, bit)
                    bit <<= 1
            runs = joined(spans, Span.continued)
            task = Task((*task.path, owner), tuple(runs))
        return task

    def _has_owners(self, path: tuple[int, ...]) -> bool:
        """Tell whether each number of ``path`` is a chunk of its level."""
        owners = zip(path, self.levels, strict=True)
        return all(0 <= owner < c for owner, c in owners)

    def as_one_task(self) -> Task:
        """Return the whole sequence as one task that keeps every pair.

        Its spans are the chunks of the first level, so its rectangles are cut at
        chunks.
        """
        spans = [Span(*chunk, bits=0) for chunk in self.chunks() if chunk.length]
        return Task((), tuple(spans))
