"""Which rows are held by only one task, and which by several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from quorum_attention.decomposition import Rows
from quorum_attention.decomposition.intervals import Cells, counted, covered, joined

Holder = Literal["only", "first", "next", "last"]


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Neighbouring rows of one task, all with the same ``holder``.

    Attributes:
        holder: which of the tasks that hold these rows this task is, in the order of tasks.
        where: the rows in the sequence, and their position in the task.
        state_start: position of the first row among all shared rows (those of several tasks).
    """

    holder: Holder
    where: Rows
    state_start: int

    @property
    def rows(self) -> slice:
        """The rows in the sequence."""
        return slice(self.where.start, self.where.stop)

    @property
    def part(self) -> slice:
        """Their positions in the task."""
        return slice(self.where.local, self.where.local + self.where.length)

    @property
    def state(self) -> slice:
        """Their positions among all shared rows; empty if only this task holds them."""
        length = 0 if self.holder == "only" else self.where.length
        return slice(self.state_start, self.state_start + length)

    def continued(self, after: HeldRows) -> HeldRows | None:
        """Both as one, if ``after`` follows these rows and has the same holder; else None. Such
        rows are neighbours among the shared rows too."""
        where = self.where.continued(after.where) if after.holder == self.holder else None
        return None if where is None else HeldRows(self.holder, where, self.state_start)


@dataclass(frozen=True, slots=True)
class Shares:
    """The rows of all tasks.

    Attributes:
        tasks: the rows of each task, in order; empty for a task without rows.
        n_shared: how many rows several tasks hold.
        nobody: the rows that no task holds.
    """

    tasks: tuple[tuple[HeldRows, ...], ...]
    n_shared: int
    nobody: tuple[slice, ...]


def count_shared(spans: Sequence[tuple[int, int]]) -> int:
    """How many rows are in more than one of ``spans``, each [start, stop)."""
    return counted(covered(spans, least=2))


def row_owners(spans: Sequence[tuple[int, int] | None], n: int) -> Shares:
    """The rows of tasks that each hold the rows [start, stop) of ``n`` rows, or none (None)."""
    return _row_owners(tuple(spans), n)


@lru_cache(maxsize=64)
def _row_owners(spans: tuple[tuple[int, int] | None, ...], n: int) -> Shares:
    cells = Cells([0, n, *(edge for span in spans if span is not None for edge in span)])
    holders: list[list[tuple[int, int]]] = [[] for _ in range(len(cells))]
    for index, span in enumerate(spans):
        if span is not None:
            for cell in cells.of(*span):
                holders[cell].append((index, span[0]))
    tasks: list[list[HeldRows]] = [[] for _ in spans]
    nobody: list[slice] = []
    n_shared = 0
    for number, holding in enumerate(holders):
        start, stop = cells[number]
        if not holding:
            nobody.append(slice(start, stop))
        for turn, (index, first) in enumerate(holding):
            where = Rows(start, stop, start - first)
            tasks[index].append(HeldRows(_holder(turn, len(holding)), where, n_shared))
        n_shared += stop - start if len(holding) > 1 else 0
    held = (tuple(joined(rows, HeldRows.continued)) for rows in tasks)
    return Shares(tuple(held), n_shared, tuple(nobody))


def _holder(number: int, count: int) -> Holder:
    if count == 1:
        return "only"
    if number == 0:
        return "first"
    return "last" if number == count - 1 else "next"
