"""The units of a pass: which of them can run, and which parts of a call are
complete."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from quorum_attention.quorums import quorum_size
from quorum_attention.quorums.interest import chunks_of_task
from quorum_attention.ray.chunks import FarmUnit, Head


class UnitQueue:
    """The units of a pass, from waiting to done.

    Args:
        parts: batch entries and key/value heads to compute, with the number of their
            part.
        n_chunks: of each head; 1: heads are whole.

    Attributes:
        n_units: all units of the pass.
        waiting: units that can run, the next one first.
    """

    def __init__(self, parts: Mapping[Head, int], n_chunks: int) -> None:
        self._parts = parts
        self._n_chunks = n_chunks
        is_cut = n_chunks > 1
        self.waiting = deque(
            FarmUnit("task" if is_cut else "head", *head, number)
            for head in sorted(parts)
            for number in range(n_chunks)
        )
        self.n_units = len(self.waiting) * (2 if is_cut else 1)
        # Units that give results and are not done, by part.
        self._n_missing = Counter(
            part for part in parts.values() for _ in range(n_chunks)
        )
        # States that exist, by the unit that merges them.
        self._n_states: Counter[FarmUnit] = Counter()

    def finish(self, unit: FarmUnit) -> int | None:
        """Note that a unit is done; return the part that is complete by that, or
        None."""
        if unit.kind == "task":
            self._count_states(unit)
            return None
        part = self._parts[unit.entry, unit.head]
        self._n_missing[part] -= 1
        return None if self._n_missing[part] else part

    def _count_states(self, task: FarmUnit) -> None:
        """Count the states that a task has left; chunks that have all of theirs are
        merged next."""
        n_needed = quorum_size(self._n_chunks)
        for chunk in chunks_of_task(task.number, self._n_chunks):
            merge = task._replace(kind="merge", number=chunk)
            self._n_states[merge] += 1
            if self._n_states[merge] == n_needed:
                self.waiting.appendleft(merge)
