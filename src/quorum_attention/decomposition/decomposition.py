"""Cuts a sequence into chunks, and chunks into tasks, level by level.

This is the paper's BuildSubseq, without arrays over tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from quorum_attention.counts import whole_number
from quorum_attention.decomposition.census import Census, census
from quorum_attention.decomposition.intervals import joined
from quorum_attention.decomposition.pairs import Pairs
from quorum_attention.decomposition.tasks import Span, Task
from quorum_attention.quorums import interest_set, quorum_size

Layout = Literal["aligned", "balanced"]


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
        """Tokens of the largest chunk of the first level; without levels, all tokens."""
        if not self.levels:
            return self.n_tokens
        return self._chunk_tokens(self.n_tokens, self.levels[0])

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

    def _chunk_of(self, position: int, tokens: int, c: int) -> int:
        """The number of the chunk that holds ``position`` where ``tokens`` are cut into ``c``."""

        def start(chunk: int) -> int:
            return self._boundaries(tokens, c, chunk)[0]

        return bisect_right(range(c), position, key=start) - 1

    def deeper(self, c: int) -> Decomposition:
        """The decomposition with one more level, of ``c`` chunks."""
        return replace(self, levels=(*self.levels, c))

    def paths(self) -> Iterator[tuple[int, ...]]:
        """The paths of all tasks, lazily, in order."""
        return product(*(range(c) for c in self.levels))

    def tasks(self) -> Iterator[Task]:
        """All tasks, lazily, in order."""
        return map(self.task, self.paths())

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

    def path_through(self, position: int, turn: int = 0) -> tuple[int, ...]:
        """The path of a task that holds the token at ``position``.

        Args:
            turn: which of the tasks that hold it; other numbers may name other tasks.

        Raises:
            ValueError: there is no such token.
        """
        if not 0 <= position < self.n_tokens:
            raise ValueError(f"position must be from 0 to {self.n_tokens - 1}, got {position}")
        path, tokens = [], self.n_tokens
        for level, c in enumerate(self.levels):
            offsets = interest_set(quorum_size(c))
            mine = self._chunk_of(position, tokens, c)
            owner = (mine - offsets[(turn + level) % len(offsets)]) % c
            path.append(owner)
            edges = {
                chunk: self._boundaries(tokens, c, chunk)
                for chunk in ((owner + o) % c for o in offsets)
            }
            before = sum(stop - start for at, (start, stop) in edges.items() if at < mine)
            position += before - edges[mine][0]
            tokens = sum(stop - start for start, stop in edges.values())
        return tuple(path)

    def whole(self) -> Task:
        """The whole sequence as one task that keeps every pair.

        Its spans are the chunks of the first level, so its rectangles are cut at chunks.
        """
        if not self.levels:
            return self.task(())
        edges = (self._boundaries(self.n_tokens, self.levels[0], i) for i in range(self.levels[0]))
        return Task((), tuple(Span(start, stop, 0) for start, stop in edges if start < stop))

    def census(self, is_causal: bool, tile: int = 128) -> Census:
        """Counts masked, clear and mixed tiles of all tasks (paper, Appendix A.2)."""
        return census(self.tasks(), Pairs(self.n_tokens, self.n_tokens, is_causal), tile)
