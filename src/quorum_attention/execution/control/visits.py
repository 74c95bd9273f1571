"""Which rows of a task are new, carried over, loaded, finished or put away.

The state of a row (statistics in the forward, gradients in the backward) travels with the row:
it starts empty at the first task that holds the row, is handed on from task to task, and is
finished by the last. Two tasks of one level always share a chunk (trimmed ones a part of it, or
nothing), so a part of the state need not travel at all: it is carried from one slot to the next on
the device.

Everything here is integers: no tensors, no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quorum_attention.decomposition import Rows, Task
from quorum_attention.decomposition.intervals import Cells, joined


class Carried(NamedTuple):
    """Rows that the previous task held as well, and where they lay there."""

    rows: Rows
    previous_local: int

    def continued(self, after: Carried) -> Carried | None:
        """Both as one where ``after`` goes on with these in both tasks."""
        rows = self.rows.continued(after.rows)
        if rows is None or after.previous_local != self.previous_local + self.rows.length:
            return None
        return Carried(rows, self.previous_local)


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


def visits(
    tasks: Sequence[Task], *, touched: Sequence[tuple[int, int]] = (), carry: bool = True
) -> Iterator[Visit]:
    """The visits of ``tasks`` in this order.

    Args:
        tasks: what is still to run, in order.
        touched: global row ranges whose state already exists from earlier work, ascending.
        carry: whether state may pass from one slot to the next (two slots or more).
    """
    every = [rows for task in tasks for rows in task.runs]
    cells = Cells(edge for held in (*every, *touched) for edge in held[:2])
    remaining = [0] * len(cells)
    for start, stop, _ in every:
        for cell in cells.of(start, stop):
            remaining[cell] += 1
    exists = [False] * len(cells)
    for start, stop in touched:
        for cell in cells.of(start, stop):
            exists[cell] = True

    edges = cells.edges
    previous: dict[int, int] = {}
    for task in tasks:
        fresh: list[Rows] = []
        carried: list[Carried] = []
        loaded: list[Rows] = []
        finished: list[Rows] = []
        stored: list[Rows] = []
        here: dict[int, int] = {}
        for start, stop, local in task.runs:
            for cell in cells.of(start, stop):
                first = edges[cell]
                rows = Rows(first, edges[cell + 1], local + first - start)
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
            tuple(joined(fresh, Rows.continued)),
            tuple(joined(carried, Carried.continued)),
            tuple(joined(loaded, Rows.continued)),
            tuple(joined(finished, Rows.continued)),
            tuple(joined(stored, Rows.continued)),
        )
        previous = here
