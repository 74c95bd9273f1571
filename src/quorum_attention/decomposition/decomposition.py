"""Chunks into tasks, level by level: the paper's BuildSubseq without per-token arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from quorum_attention.decomposition.census import Census, census
from quorum_attention.decomposition.intervals import joined
from quorum_attention.decomposition.tasks import Span, Task
from quorum_attention.quorums import interest_set, quorum_size

Layout = Literal["aligned", "balanced"]


@dataclass(frozen=True)
class Decomposition:
    """A token sequence cut by cyclic quorum sets, recursively.

    Attributes:
        n_tokens: positions 0..n_tokens-1.
        levels: chunk count c of each level, each l (l - 1) + 1 of a valid quorum size l; () is
            the monolithic call, one task.
        layout: "aligned" cuts at multiples of ``tile`` (equal chunks, the last one ragged, later
            ones empty), "balanced" into chunks that differ by at most one token (the paper's).
        tile: of the aligned layout, in tokens.

    Raises:
        ValueError, TypeError: a field that is not of that form.
    """

    n_tokens: int
    levels: tuple[int, ...] = ()
    layout: Layout = "aligned"
    tile: int = 128

    def __post_init__(self) -> None:
        for name, value, least in (("n_tokens", self.n_tokens, 0), ("tile", self.tile, 1)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be a whole number, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
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
        """Tasks: the product of the chunk counts."""
        count = 1
        for c in self.levels:
            count *= c
        return count

    @property
    def max_task_tokens(self) -> int:
        """No task has more tokens."""
        tokens = self.n_tokens
        for c in self.levels:
            tokens = min(tokens, quorum_size(c) * self._chunk_tokens(tokens, c))
        return tokens

    @property
    def chunk_tokens(self) -> int:
        """Tokens of the largest chunk of the first level; all of them where there is none."""
        if not self.levels:
            return self.n_tokens
        return self._chunk_tokens(self.n_tokens, self.levels[0])

    def _chunk_tokens(self, tokens: int, c: int) -> int:
        """Tokens of the largest of ``c`` chunks."""
        largest = -(-tokens // c)
        return -(-largest // self.tile) * self.tile if self.layout == "aligned" else largest

    def _boundaries(self, tokens: int, c: int, chunk: int) -> tuple[int, int]:
        if self.layout == "aligned":
            size = self._chunk_tokens(tokens, c)
            return min(tokens, chunk * size), min(tokens, (chunk + 1) * size)
        size, longer = divmod(tokens, c)
        start = chunk * size + min(chunk, longer)
        return start, start + size + (chunk < longer)

    def deeper(self, c: int) -> Decomposition:
        """The same with one level of ``c`` chunks more."""
        return replace(self, levels=(*self.levels, c))

    def paths(self) -> Iterator[tuple[int, ...]]:
        """The paths of all tasks, lazily, in order."""
        return product(*(range(c) for c in self.levels))

    def tasks(self) -> Iterator[Task]:
        """All tasks, lazily, in order."""
        for path in self.paths():
            yield self.task(path)

    def task(self, path: tuple[int, ...]) -> Task:
        """The task of this path.

        Raises:
            TypeError: it is no tuple of whole numbers.
            ValueError: no task has it.
        """
        # A path names the task in schedules and reports: (1.0,) and (True,) would pass for (1,).
        if not isinstance(path, tuple) or any(type(owner) is not int for owner in path):
            raise TypeError(f"path must be a tuple of whole numbers, got {path!r}")
        fits = len(path) == self.depth and all(
            0 <= owner < c for owner, c in zip(path, self.levels, strict=True)
        )
        if not fits:
            raise ValueError(f"path must be one owner chunk for each of {self.levels}, got {path}")
        spans = [Span(0, self.n_tokens, 0)] if self.n_tokens else []
        tokens, next_bit = self.n_tokens, 1
        for owner, c in zip(path, self.levels, strict=True):
            chosen: list[Span] = []
            kept = 0
            pieces = _Pieces(spans)
            for chunk in sorted((owner + o) % c for o in interest_set(quorum_size(c))):
                start, stop = self._boundaries(tokens, c, chunk)
                bit = 0
                if chunk != owner:
                    bit, next_bit = next_bit, next_bit << 1
                if start < stop:
                    chosen.extend(pieces.between(start, stop, bit))
                    kept += stop - start
            spans, tokens = joined(chosen, Span.continued), kept
        return Task(path, tuple(spans))

    def whole(self) -> Task:
        """The whole sequence as one task, its spans the chunks of the first level: every pair is
        kept, as it is by all tasks together."""
        if not self.levels:
            return self.task(())
        edges = (self._boundaries(self.n_tokens, self.levels[0], i) for i in range(self.levels[0]))
        return Task((), tuple(Span(start, stop, 0) for start, stop in edges if start < stop))

    def census(self, is_causal: bool, tile: int = 128) -> Census:
        """Tiles of all tasks by verdict: masked, clear, mixed (paper, Appendix A.2)."""
        return census(self.tasks(), is_causal, tile)


class _Pieces:
    """Reads ascending local ranges off a list of spans."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self.index = 0
        self.local = 0  # local start of spans[index]

    def between(self, start: int, stop: int, bit: int) -> Iterator[Span]:
        """The spans of local [start, stop), with ``bit`` added."""
        while self.index < len(self.spans):
            span = self.spans[self.index]
            length = span.stop - span.start
            low, high = max(start, self.local), min(stop, self.local + length)
            if low < high:
                offset = span.start - self.local
                yield Span(low + offset, high + offset, span.bits | bit)
            if self.local + length > stop:
                return
            self.local += length
            self.index += 1
