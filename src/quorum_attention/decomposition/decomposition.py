"""Cuts a sequence into chunks, and chunks into tasks, level by level, without arrays over tokens.

A task is the tokens of one subsequence, as spans with group bits (paper, section 3.3); making them
is the paper's BuildSubseq.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from operator import and_, or_
from typing import TYPE_CHECKING, Literal

from quorum_attention.counts import whole_number
from quorum_attention.decomposition.intervals import Interval, Rows, joined, union
from quorum_attention.decomposition.pairs import (
    EMPTY,
    FULL,
    PARTIAL,
    Pairs,
    Ranges,
    Verdict,
    both,
    quarters,
    walk,
)
from quorum_attention.decomposition.rectangles import Rectangle, clip, cover, cut
from quorum_attention.quorums import interest_set, quorum_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Layout = Literal["aligned", "balanced"]


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


@dataclass(frozen=True)
class Decomposition:
    """A token sequence cut by cyclic quorum sets, recursively.

    Attributes:
        n_tokens: tokens of the sequence, at positions 0 to n_tokens - 1.
        levels: chunk count of each level, c = l (l - 1) + 1 for a valid quorum size l; () is one
            task, the whole sequence.
        layout: "aligned" cuts at multiples of ``tile``, so chunks are equal, but the last may be
            shorter and others after it empty; "balanced" makes chunks that differ by at most one
            token (the paper's).
        tile: tokens; used by the aligned layout.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that is not allowed.
    """

    n_tokens: int
    levels: tuple[int, ...] = ()
    layout: Layout = "aligned"
    tile: int = 128

    def __post_init__(self) -> None:
        for name, least in (("n_tokens", 0), ("tile", 1)):
            object.__setattr__(self, name, whole_number(getattr(self, name), name, least))
        if self.layout not in ("aligned", "balanced"):
            raise ValueError(f"layout must be 'aligned' or 'balanced', got {self.layout!r}")
        if not isinstance(self.levels, tuple):
            raise TypeError(f"levels must be a tuple of chunk counts, got {self.levels!r}")
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
        """Tokens of the largest chunk of the first level, at least 1; or all without levels."""
        tokens, levels = self.n_tokens, self.levels
        return max(1, min(tokens, self._chunk_tokens(tokens, levels[0]) if levels else tokens))

    def _chunk_tokens(self, tokens: int, c: int) -> int:
        """Tokens of the largest chunk where ``tokens`` are cut into ``c``."""
        largest = -(-tokens // c)
        return -(-largest // self.tile) * self.tile if self.layout == "aligned" else largest

    def _boundaries(self, tokens: int, c: int, chunk: int) -> tuple[int, int]:
        """[start, stop) of chunk number ``chunk`` where ``tokens`` are cut into ``c``."""
        if self.layout == "aligned":
            size = self._chunk_tokens(tokens, c)
            return min(tokens, chunk * size), min(tokens, (chunk + 1) * size)
        size, longer = divmod(tokens, c)
        start = chunk * size + min(chunk, longer)
        return start, start + size + (chunk < longer)

    def deeper(self, c: int) -> Decomposition:
        """The decomposition with one more level, of ``c`` chunks."""
        return replace(self, levels=(*self.levels, c))

    def tasks(self) -> Iterator[Task]:
        """All tasks, lazily, in the order of their paths."""
        return map(self.task, product(*map(range, self.levels)))

    def task(self, path: tuple[int, ...]) -> Task:
        """The task named by ``path``, one owner chunk for each level.

        Raises:
            TypeError: ``path`` is no tuple of whole numbers.
            ValueError: there is no task of that path.
        """
        # (1.0,) and (True,) equal (1,), but must not name the same task in a report.
        if not isinstance(path, tuple) or any(type(owner) is not int for owner in path):
            raise TypeError(f"path must be a tuple of whole numbers, got {path!r}")
        fits = len(path) == self.depth and all(
            0 <= owner < c for owner, c in zip(path, self.levels, strict=True)
        )
        if not fits:
            raise ValueError(f"path must be one owner chunk for each of {self.levels}, got {path}")
        task = Task((), (Span(0, self.n_tokens, 0),) if self.n_tokens else ())
        bit = 1
        for owner, c in zip(path, self.levels, strict=True):
            chosen: list[Span] = []
            for chunk in sorted((owner + o) % c for o in interest_set(quorum_size(c))):
                start, stop = self._boundaries(task.n_tokens, c, chunk)
                chosen += task.between(start, stop, 0 if chunk == owner else bit)
                bit <<= chunk != owner
            task = Task((*task.path, owner), tuple(joined(chosen, Span.continued)))
        return task

    def whole(self) -> Task:
        """The whole sequence as one task that keeps every pair.

        Its spans are the chunks of the first level, so its rectangles are cut at chunks.
        """
        if not self.levels:
            return self.task(())
        edges = (self._boundaries(self.n_tokens, self.levels[0], i) for i in range(self.levels[0]))
        return Task((), tuple(Span(start, stop, 0) for start, stop in edges if start < stop))


# --- The tile census: how many score tiles are masked, clear or mixed (paper, Appendix A.2) ------
#
# A tile is *clear* if its rows and its columns have no group bit in common, *masked* if one bit is
# in all of its rows and all of its columns, else *mixed*. Two numbers for the rows and two for the
# columns decide it: the bitwise OR and the bitwise AND of their group bits. Under a mask a tile has
# to be kept by the mask as well.


@dataclass(frozen=True, slots=True)
class Census:
    """Shares of score tiles (fractions of one).

    Attributes:
        masked: no pair is kept.
        clear: every pair is kept.
        mixed: pairs have to be tested one by one.
        tiles: how many there are of all kinds.
    """

    masked: float
    clear: float
    mixed: float
    tiles: int


def census(tasks: Iterable[Task], pairs: Pairs, tile: int = 128) -> Census:
    """Counts the tiles of all ``tasks`` together.

    Args:
        pairs: which pairs the call keeps; if causal, only tiles on or below the diagonal are
            counted, and one on the diagonal is told by its other rules.
        tile: tokens along each side of a tile.

    Raises:
        ValueError: ``tile`` is no whole number from 1.
    """
    tile = whole_number(tile, "tile", 1)
    counts: Counter[Verdict] = Counter()
    for task in tasks:
        counts += _tiles_of(task, pairs, tile)
    tiles = sum(counts.values())
    masked, clear, mixed = (counts[kind] / max(1, tiles) for kind in (EMPTY, FULL, PARTIAL))
    return Census(masked, clear, mixed, tiles)


def _tiles_of(task: Task, pairs: Pairs, tile: int) -> Counter[Verdict]:
    """The verdicts of a task's tiles, by group bits and mask; in blocks of tiles that are alike."""
    counts: Counter[Verdict] = Counter()
    kept = replace(pairs, is_causal=False).of
    lines = [
        [span.bits for span in task.between(at, at + tile)] for at in range(0, task.n_tokens, tile)
    ]

    def verdict(block: Ranges) -> Verdict:
        (r0, r1), (c0, c1) = block
        if pairs.is_causal and c1 - 1 > r0:
            return EMPTY if c0 >= r1 else PARTIAL
        rows, columns = ([b for line in lines[a:z] for b in line] for a, z in block)
        if reduce(and_, rows) & reduce(and_, columns):
            return EMPTY
        clear = not reduce(or_, rows) & reduce(or_, columns)
        queries, keys = (
            task.segments(start * tile, min(stop * tile, task.n_tokens)) for start, stop in block
        )
        by_mask = kept(Ranges.of(queries[0].start, queries[-1].stop, keys[0].start, keys[-1].stop))
        return both(FULL if clear else PARTIAL, by_mask)

    n = len(lines)
    for ((r0, r1), (c0, c1)), found in walk(Ranges.of(0, n, 0, n), verdict, quarters) if n else ():
        if not (pairs.is_causal and c0 >= r1):
            counts[found] += (r1 - r0) * (c1 - c0)
    return counts
