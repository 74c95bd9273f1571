"""Which rows of a call one task alone has, and which several have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

Holder = Literal["only", "first", "next", "last"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring rows of one task.

    Attributes:
        holder: which of those that have these rows the task is, in the order of tasks.
        rows: of the whole sequence.
        part: where they lie among the task's own.
        state: where they lie among all rows of several tasks; empty if it is the only one.
    """

    holder: Holder
    rows: slice
    part: slice
    state: slice


@dataclass(frozen=True, slots=True)
class Shares:
    """All tasks' rows.

    Attributes:
        tasks: pieces of every task, in order; none where it has no rows.
        n_shared: rows that several tasks have.
        nobody: rows that no task has.
    """

    tasks: tuple[tuple[Piece, ...], ...]
    n_shared: int
    nobody: tuple[slice, ...]


def count_shared(spans: Sequence[tuple[int, int]]) -> int:
    """Rows that more than one span has."""
    edges = sorted([(start, 1) for start, _ in spans] + [(stop, -1) for _, stop in spans])
    total = holders = last = 0
    for at, change in edges:
        if holders > 1:
            total += at - last
        holders, last = holders + change, at
    return total


def shares(spans: Sequence[tuple[int, int] | None], n: int) -> Shares:
    """The shares of tasks that each have the rows [start, stop) of ``n``, or none."""
    return _shares(tuple(spans), n)


@lru_cache(maxsize=64)
def _shares(spans: tuple[tuple[int, int] | None, ...], n: int) -> Shares:
    edges = sorted({0, n, *(edge for span in spans if span is not None for edge in span)})
    tasks: list[list[Piece]] = [[] for _ in spans]
    nobody: list[slice] = []
    n_shared = 0
    for start, stop in pairwise(edges):
        holders = [
            (index, span[0])
            for index, span in enumerate(spans)
            if span is not None and span[0] <= start and stop <= span[1]
        ]
        if not holders:
            nobody.append(slice(start, stop))
        length = stop - start if len(holders) > 1 else 0
        state = slice(n_shared, n_shared + length)
        n_shared += length
        for number, (index, first) in enumerate(holders):
            part = slice(start - first, stop - first)
            piece = Piece(_holder(number, len(holders)), slice(start, stop), part, state)
            _append(tasks[index], piece)
    return Shares(tuple(map(tuple, tasks)), n_shared, tuple(nobody))


def _holder(number: int, count: int) -> Holder:
    if count == 1:
        return "only"
    if number == 0:
        return "first"
    return "last" if number == count - 1 else "next"


def _append(pieces: list[Piece], piece: Piece) -> None:
    """After the last one, or as one with it."""
    if pieces:
        last = pieces[-1]
        touches = last.rows.stop == piece.rows.start and last.state.stop == piece.state.start
        if touches and last.holder == piece.holder:
            pieces[-1] = Piece(
                piece.holder,
                slice(last.rows.start, piece.rows.stop),
                slice(last.part.start, piece.part.stop),
                slice(last.state.start, piece.state.stop),
            )
            return
    pieces.append(piece)
