"""A task: the tokens of one subsequence, as spans with group bits (paper, Section 3.3)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from quorum_attention.counts import whole_number
from quorum_attention.decomposition.intervals import Interval, Rows, joined, union
from quorum_attention.decomposition.rectangles import Rectangle, clip, cover, cut

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Span:
    """A maximal run of consecutive tokens of a task with the same group bits.

    Attributes:
        start, stop: global token positions, [start, stop).
        bits: one bit for each non-owner chunk it lies in, over all levels; a pair (q, k) is kept
            where bits[q] & bits[k] == 0.
    """

    start: int
    stop: int
    bits: int

    def continued(self, after: Span) -> Span | None:
        """Both as one if ``after`` comes next and has the same bits; else None."""
        if after.start != self.stop or after.bits != self.bits:
            return None
        return Span(self.start, after.stop, self.bits)


@dataclass(frozen=True)
class Task:
    """One subsequence task. Local positions number its tokens in ascending order from 0.

    Attributes:
        path: owner chunk at each level, () for the monolithic task.
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
        """The task's tokens as runs of consecutive positions; a run may have several spans."""
        rows = (
            Rows(s.start, s.stop, at) for s, at in zip(self.spans, self.local_starts, strict=False)
        )
        return tuple(joined(rows, Rows.continued))

    def count_below(self, n: int) -> int:
        """The number of tokens at global positions below ``n``; they come first in the task."""
        return sum(max(0, min(span.stop, n) - span.start) for span in self.spans)

    def between(self, local_start: int, local_stop: int, bit: int = 0) -> Iterator[Span]:
        """The parts of the task's spans at the local positions [local_start, local_stop), with
        ``bit`` added to their group bits."""
        starts = self.local_starts
        for at in range(bisect_right(starts, local_start) - 1, len(self.spans)):
            span = self.spans[at]
            low, high = max(local_start, starts[at]), min(local_stop, starts[at + 1])
            if low >= high:
                return
            offset = span.start - starts[at]
            yield Span(low + offset, high + offset, span.bits | bit)

    def segments(self, local_start: int, local_stop: int) -> list[Rows]:
        """The local positions [local_start, local_stop), as runs of consecutive tokens."""
        found = []
        for start, stop, local in self.runs:
            low, high = max(local, local_start), min(local + stop - start, local_stop)
            if low < high:
                found.append(Rows(low + start - local, high + start - local, low))
        return found

    def contiguous(self, r: Rectangle) -> Iterator[tuple[Rows, Rows, bool]]:
        """Cuts a rectangle into parts whose tokens are consecutive in the whole sequence too.

        Yields:
            (queries, keys, causal) of every part; the rows of each in both positions.
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
        """The kept pairs as plain attention calls, in local positions; each pair in exactly one.

        Args:
            is_causal: keep only keys at or before the query (global positions, top-left).
            n_queries, n_keys: leave out global positions from here on; None is no limit.
            max_queries, max_keys: the largest rectangle allowed; None is no limit.

        Raises:
            TypeError: a count or limit is no whole number.
            ValueError: a count is below 0 or a limit below 1.
        """
        tokens = self.n_tokens
        rows, columns = (
            tokens if n is None else self.count_below(whole_number(n, name, 0))
            for name, n in (("n_queries", n_queries), ("n_keys", n_keys))
        )
        height, width = (
            max(1, tokens) if n is None else whole_number(n, name, 1)
            for name, n in (("max_queries", max_queries), ("max_keys", max_keys))
        )
        causal = bool(is_causal)
        if causal not in self._covers:
            bits = [span.bits for span in self.spans]
            self._covers[causal] = tuple(cover(self.local_starts, bits, causal))
        found = self._covers[causal]
        if rows < tokens or columns < tokens:
            found = tuple(clip(found, rows, columns))
        if height < tokens or width < tokens:
            found = tuple(cut(found, height, width))
        return found

    @cached_property
    def _covers(self) -> dict[bool, tuple[Rectangle, ...]]:
        """The rectangles without limits, by ``is_causal``; filled on first use."""
        return {}

    def mask(self) -> NDArray[np.bool_]:
        """The CQS mask over the task's tokens, (n_tokens, n_tokens) bool, True is kept.

        It is dense, so for small tasks only. Causality is not part of it.
        """
        import numpy as np

        lengths = [span.stop - span.start for span in self.spans]
        kept = [[a.bits & b.bits == 0 for b in self.spans] for a in self.spans]
        small = np.array(kept, dtype=bool).reshape(len(self.spans), len(self.spans))
        return np.repeat(np.repeat(small, lengths, axis=0), lengths, axis=1)


def tokens_of(*tasks: Task) -> list[Interval]:
    """The global positions of all tokens of ``tasks``."""
    return union((start, stop) for task in tasks for start, stop, _ in task.runs)
