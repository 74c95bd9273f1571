"""Which rows of a call one task alone has, and which several have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from quorum_attention.execution.visits import Rows


@dataclass(frozen=True, slots=True)
class Share:
    """One task's rows: those that no other task has, and those that others have as well.

    ``local`` of both is where a row lies in the task's span; of ``shared`` rows ``at`` says where
    they lie among all shared rows.
    """

    alone: tuple[Rows, ...]
    shared: tuple[Rows, ...]
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """All tasks' rows.

    Attributes:
        tasks: in order; a task without a span has neither kind.
        shared: rows of several tasks, ascending; ``local`` is where they lie among themselves.
        n_shared: how many those are.
        nobody: (start, stop) of rows that no task has.
    """

    tasks: tuple[Share, ...]
    shared: tuple[Rows, ...]
    n_shared: int
    nobody: tuple[tuple[int, int], ...]


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
    cells = list(pairwise(edges))
    counts = [
        sum(span is not None and span[0] <= start and stop <= span[1] for span in spans)
        for start, stop in cells
    ]
    runs = [cell for cell, count in zip(cells, counts, strict=True) if count > 1]
    shared: list[Rows] = []
    total = 0
    for start, stop in _joined(runs):
        shared.append(Rows(start, stop, total))
        total += stop - start

    def share(span: tuple[int, int] | None) -> Share:
        if span is None:
            return Share((), (), ())
        first, last = span
        alone = _joined(
            [
                (start, stop)
                for (start, stop), count in zip(cells, counts, strict=True)
                if count == 1 and first <= start and stop <= last
            ]
        )
        cut = [
            (max(first, r.start), min(last, r.stop), r.local + max(0, first - r.start))
            for r in shared
            if r.start < last and first < r.stop
        ]
        return Share(
            tuple(Rows(start, stop, start - first) for start, stop in alone),
            tuple(Rows(start, stop, start - first) for start, stop, _ in cut),
            tuple(at for _, _, at in cut),
        )

    nobody = [cell for cell, count in zip(cells, counts, strict=True) if not count]
    return Shares(tuple(map(share, spans)), tuple(shared), total, tuple(_joined(nobody)))


def _joined(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in pieces:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
