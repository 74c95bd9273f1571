"""Which rows of a task are fresh, carried, loaded, finished or stored.

Every row has a state: statistics in the forward, gradients in the backward. The state starts empty
at the first task that holds the row, is passed from task to task, and is finished by the last.
Between tasks it is stored at its home. Two tasks of one level always share a chunk (trimmed tasks
share a part of one, or nothing), so the state of shared rows can stay on the device: it is carried
from one slot to the next.

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
    """Rows that the previous task held as well, and their first position in that task."""

    rows: Rows
    previous_local: int

    def continued(self, after: Carried) -> Carried | None:
        """Both as one, if ``after`` follows these rows in both tasks; else None."""
        rows = self.rows.continued(after.rows)
        if rows is None or after.previous_local != self.previous_local + self.rows.length:
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
    tasks: Sequence[Task], *, touched: Sequence[tuple[int, int]] = (), carry: bool = True
) -> Iterator[Visit]:
    """The visits of ``tasks`` in this order.

    Args:
        tasks: the tasks that are left, in order.
        touched: ranges of global rows, ascending, whose state exists from completed tasks.
        carry: whether state may be carried from slot to slot; this takes two slots or more.
    """
    every = [rows for task in tasks for rows in task.runs]
    # Rows between neighbouring edges have one fate.
    edges = sorted({edge for held in (*every, *touched) for edge in held[:2]})
    remaining, exists = [0] * len(edges), [False] * len(edges)

    def cells(start: int, stop: int) -> range:
        return range(bisect_left(edges, start), bisect_left(edges, stop))

    for start, stop, _ in every:
        for cell in cells(start, stop):
            remaining[cell] += 1
    for start, stop in touched:
        for cell in cells(start, stop):
            exists[cell] = True
    previous: dict[int, int] = {}
    for task in tasks:
        fresh, loaded, finished, stored = (list[Rows]() for _ in range(4))
        carried: list[Carried] = []
        here: dict[int, int] = {}
        for start, stop, local in task.runs:
            for cell in cells(start, stop):
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
            fresh=tuple(joined(fresh, Rows.continued)),
            carried=tuple(joined(carried, Carried.continued)),
            loaded=tuple(joined(loaded, Rows.continued)),
            finished=tuple(joined(finished, Rows.continued)),
            stored=tuple(joined(stored, Rows.continued)),
        )
        previous = here
