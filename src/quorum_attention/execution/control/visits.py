"""Which rows of a task are fresh, carried, loaded, finished or stored.

Every row has a state: statistics in the forward, gradients in the backward. The state
starts empty at the first task that holds the row, is passed from task to task, and is
finished by the last. Between tasks it is stored at its home. Two tasks of one level
always share a chunk (trimmed tasks share a part of one, or nothing), so the state of
shared rows can stay on the device: it is carried from one slot to the next.

Everything here is integers: no tensors, no device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quorum_attention.decomposition import Rows, Task
from quorum_attention.decomposition.intervals import joined


class Carried(NamedTuple):
    """Rows that the previous task held as well, and their first position in that
    task."""

    rows: Rows
    previous_local: int

    def continued(self, after: Carried) -> Carried | None:
        """Both as one, if ``after`` follows these rows in both tasks; else None."""
        rows = self.rows.continued(after.rows)
        if rows is None:
            return None
        next_local = self.previous_local + self.rows.length
        if after.previous_local != next_local:
            return None
        return Carried(rows, self.previous_local)


@dataclass(frozen=True, slots=True)
class Visit:
    """A task, with its rows sorted by where their state comes from and where it goes.

    Attributes:
        fresh: rows that no earlier task held; their state is empty.
        carried: rows whose state is copied from the previous task's slot.
        loaded: rows whose state is copied from its home.
        finished: rows that no later task holds; their state is final.
        stored: rows whose state is copied to its home.
    """

    task: Task
    fresh: tuple[Rows, ...]
    carried: tuple[Carried, ...]
    loaded: tuple[Rows, ...]
    finished: tuple[Rows, ...]
    stored: tuple[Rows, ...]


def visits(
    tasks: Sequence[Task],
    *,
    touched: Sequence[tuple[int, int]] = (),
    carry: bool = True,
) -> Iterator[Visit]:
    """The visits of ``tasks`` in this order.

    Args:
        tasks: the tasks that are left, in order.
        touched: ranges of global rows, ascending, whose state exists from completed
            tasks.
        carry: whether state may be carried from slot to slot; this takes two slots or
            more.
    """
    runs: list[tuple[int, int]] = []
    for task in tasks:
        runs += [(rows.start, rows.stop) for rows in task.runs]
    cells = _Cells(runs, touched)
    # The cells of the previous task, with the local position of each.
    previous: dict[int, int] = {}
    for task in tasks:
        carriable = previous if carry else {}
        visit, previous = cells.visit(task, carriable)
        yield visit


class _Cells:
    """Rows between neighbouring edges of runs, which have one fate.

    Attributes:
        edges: where a run begins or ends, ascending; cell i is the rows [edges[i],
            edges[i + 1]).
        n_remaining: by cell, how many tasks hold it that were not visited.
        exists: by cell, whether its state exists.
    """

    def __init__(
        self, runs: Sequence[tuple[int, int]], touched: Sequence[tuple[int, int]]
    ) -> None:
        edges: set[int] = set()
        for start, stop in (*runs, *touched):
            edges.add(start)
            edges.add(stop)
        self.edges = sorted(edges)
        self.n_remaining = [0] * len(self.edges)
        self.exists = [False] * len(self.edges)
        for start, stop in runs:
            for cell in self._between(start, stop):
                self.n_remaining[cell] += 1
        for start, stop in touched:
            for cell in self._between(start, stop):
                self.exists[cell] = True

    def _between(self, start: int, stop: int) -> range:
        """The cells of the rows [start, stop)."""
        first_cell = bisect_left(self.edges, start)
        end_cell = bisect_left(self.edges, stop)
        return range(first_cell, end_cell)

    def visit(
        self, task: Task, previous: dict[int, int]
    ) -> tuple[Visit, dict[int, int]]:
        """Visit the next task.

        Args:
            previous: the cells whose state may be carried, with their local positions.

        Returns:
            the visit, and the task's cells with their local positions.
        """
        fresh: list[Rows] = []
        carried: list[Carried] = []
        loaded: list[Rows] = []
        finished: list[Rows] = []
        stored: list[Rows] = []
        local_of_cell: dict[int, int] = {}
        for start, stop, local in task.runs:
            for cell in self._between(start, stop):
                first = self.edges[cell]
                after = self.edges[cell + 1]
                cell_local = local + first - start
                rows = Rows(first, after, cell_local)
                local_of_cell[cell] = cell_local
                if not self.exists[cell]:
                    fresh.append(rows)
                elif cell in previous:
                    carried.append(Carried(rows, previous[cell]))
                else:
                    loaded.append(rows)
                self.exists[cell] = True
                self.n_remaining[cell] -= 1
                if self.n_remaining[cell]:
                    stored.append(rows)
                else:
                    finished.append(rows)
        visit = Visit(
            task,
            fresh=tuple(joined(fresh, Rows.continued)),
            carried=tuple(joined(carried, Carried.continued)),
            loaded=tuple(joined(loaded, Rows.continued)),
            finished=tuple(joined(finished, Rows.continued)),
            stored=tuple(joined(stored, Rows.continued)),
        )
        return visit, local_of_cell
