"""Which rows of a task are new, carried over, loaded, finished or put away.

The state of a row (statistics in the forward, gradients in the backward) travels with the row:
it starts empty at the first task that holds the row, is handed on from task to task, and is
finished by the last. Two tasks of one level always share a chunk (trimmed ones a part of it, or
nothing), so a part of the state need not travel at all: it is carried from one slot to the next on
the device.

Everything here is integers: no tensors, no device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quorum_attention.decomposition import Task


@dataclass(frozen=True, slots=True)
class Rows:
    """A run of neighbouring rows: global [start, stop), and where it lies in the task."""

    start: int
    stop: int
    local: int

    def below(self, n: int) -> Rows | None:
        """The part at positions < ``n``, None where nothing is left."""
        if self.start >= n:
            return None
        return Rows(self.start, min(self.stop, n), self.local)


@dataclass(frozen=True, slots=True)
class Carried:
    """Rows that the previous task held as well, and where they lay there."""

    rows: Rows
    previous_local: int


@dataclass(frozen=True, slots=True)
class Visit:
    """One task's turn in the queue.

    ``fresh`` + ``carried`` + ``loaded`` are the task's rows by where their state comes from;
    ``finished`` + ``stored`` are the same rows by where it goes.
    """

    task: Task
    fresh: tuple[Rows, ...]
    carried: tuple[Carried, ...]
    loaded: tuple[Rows, ...]
    finished: tuple[Rows, ...]
    stored: tuple[Rows, ...]


def _join(pieces: list[Rows]) -> tuple[Rows, ...]:
    joined: list[Rows] = []
    for piece in pieces:
        if joined:
            last = joined[-1]
            touches = last.stop == piece.start
            if touches and last.local + last.stop - last.start == piece.local:
                joined[-1] = Rows(last.start, piece.stop, last.local)
                continue
        joined.append(piece)
    return tuple(joined)


def _join_carried(pieces: list[Carried]) -> tuple[Carried, ...]:
    joined: list[Carried] = []
    for piece in pieces:
        if joined:
            last = joined[-1]
            length = last.rows.stop - last.rows.start
            touches = (
                last.rows.stop == piece.rows.start
                and last.rows.local + length == piece.rows.local
                and last.previous_local + length == piece.previous_local
            )
            if touches:
                rows = Rows(last.rows.start, piece.rows.stop, last.rows.local)
                joined[-1] = Carried(rows, last.previous_local)
                continue
        joined.append(piece)
    return tuple(joined)


def visits(
    tasks: Sequence[Task], *, touched: Sequence[tuple[int, int]] = (), carry: bool = True
) -> Iterator[Visit]:
    """The visits of ``tasks`` in this order.

    Args:
        tasks: what is still to run, in order.
        touched: global row ranges whose state already exists from earlier work, ascending.
        carry: whether state may pass from one slot to the next (two slots or more).
    """
    cuts = sorted(
        {edge for task in tasks for start, stop, _ in task.runs for edge in (start, stop)}
        | {edge for piece in touched for edge in piece}
    )
    remaining = [0] * len(cuts)
    for task in tasks:
        for start, stop, _ in task.runs:
            for cell in range(bisect_left(cuts, start), bisect_left(cuts, stop)):
                remaining[cell] += 1
    exists = [False] * len(cuts)
    for start, stop in touched:
        for cell in range(bisect_left(cuts, start), bisect_left(cuts, stop)):
            exists[cell] = True

    previous: dict[int, int] = {}
    for task in tasks:
        fresh: list[Rows] = []
        carried: list[Carried] = []
        loaded: list[Rows] = []
        finished: list[Rows] = []
        stored: list[Rows] = []
        here: dict[int, int] = {}
        for start, stop, local in task.runs:
            for cell in range(bisect_left(cuts, start), bisect_left(cuts, stop)):
                rows = Rows(cuts[cell], cuts[cell + 1], local + cuts[cell] - start)
                here[cell] = rows.local
                if not exists[cell]:
                    fresh.append(rows)
                elif carry and cell in previous:
                    carried.append(Carried(rows, previous[cell]))
                else:
                    loaded.append(rows)
                exists[cell] = True
                remaining[cell] -= 1
                (stored if remaining[cell] else finished).append(rows)
        yield Visit(
            task,
            _join(fresh),
            _join_carried(carried),
            _join(loaded),
            _join(finished),
            _join(stored),
        )
        previous = here


def touched_rows(tasks: Sequence[Task]) -> list[tuple[int, int]]:
    """The global row ranges that ``tasks`` hold between them, ascending and disjoint."""
    pieces = sorted((start, stop) for task in tasks for start, stop, _ in task.runs)
    joined: list[tuple[int, int]] = []
    for start, stop in pieces:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined
