"""Which partial states there are, of which tasks, and who brings them together.

A worker that computes a task takes over the states of its chunks that others have left, adds its
own, and leaves one state for each chunk; where that has all tasks of the chunk, it writes the
chunk's result instead. So at any time there is about one state of each chunk, and one more for each
worker. Nothing is removed before what replaces it is known to be there: a worker that dies costs no
task but its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.farm.units import Cut, Joint, Unit

Key = tuple[int, int, int]
_Work = Unit | Joint


class Fold(NamedTuple):
    """What to do with the state of a chunk.

    Attributes:
        chunk: its number.
        take: names of states to bring together with the worker's own.
        put: the name of the state that is left; None: it is complete, and goes to the result.
    """

    chunk: int
    take: tuple[str, ...]
    put: str | None


@dataclass(frozen=True, slots=True)
class _State:
    name: str
    tasks: frozenset[int]


class Ledger:
    """The states of one pass.

    Args:
        cut: of the call.
        name: makes a name that no state had, from (entry, key/value head, chunk).
    """

    def __init__(self, cut: Cut, name: Callable[[Key, int], str]) -> None:
        self._cut, self._name = cut, name
        self._free: dict[Key, list[_State]] = {}
        self._claims: dict[_Work, list[tuple[Key, list[_State], Fold]]] = {}
        self._complete: set[Key] = set()
        self._count = 0

    @property
    def names(self) -> list[str]:
        """The states that there are."""
        claimed = (
            one for claim in self._claims.values() for _, states, _ in claim for one in states
        )
        free = (one for states in self._free.values() for one in states)
        return [one.name for one in (*free, *claimed)]

    def claim(self, work: _Work) -> tuple[Fold, ...]:
        """What a worker that begins ``work`` does with the states of its chunks."""
        assert work not in self._claims, "an earlier claim was not released"
        claim = []
        chunks = (work.chunk,) if isinstance(work, Joint) else self._chunks(work)
        for chunk in chunks:
            key = (work.entry, work.kv.start, chunk)
            states = self._free.pop(key, [])
            known = self._covered(states) | self._own(work)
            put = None
            if known != self._cut.tasks(chunk):
                self._count += 1
                put = self._name(key, self._count)
            fold = Fold(chunk, tuple(one.name for one in states), put)
            claim.append((key, states, fold))
        self._claims[work] = claim
        return tuple(fold for _, _, fold in claim)

    def release(self, work: _Work) -> list[str]:
        """Nobody computes ``work`` any more; returns the names of what it may have left."""
        claim = self._claims.pop(work, [])
        for key, states, _ in claim:
            if states:
                self._free.setdefault(key, []).extend(states)
        return [fold.put for _, _, fold in claim if fold.put is not None]

    def done(self, work: _Work) -> list[str]:
        """``work`` is done; returns the names of states that nobody needs any more."""
        gone = []
        for key, states, fold in self._claims.pop(work):
            gone += [one.name for one in states]
            if fold.put is None:
                self._complete.add(key)
            else:
                tasks = self._covered(states) | self._own(work)
                self._free.setdefault(key, []).append(_State(fold.put, tasks))
        return gone

    def left(self) -> list[Joint]:
        """The chunks whose states are all there and not yet in the result."""
        found = []
        for (entry, head, chunk), states in self._free.items():
            assert self._covered(states) == self._cut.tasks(chunk), "a task is missing"
            found.append(Joint(entry, _one(head), chunk))
        return found

    def _chunks(self, unit: Unit) -> Iterable[int]:
        return () if unit.task is None else self._cut.quorum(unit.task)

    @staticmethod
    def _own(work: _Work) -> frozenset[int]:
        if isinstance(work, Joint) or work.task is None:
            return frozenset()
        return frozenset((work.task,))

    @staticmethod
    def _covered(states: Iterable[_State]) -> frozenset[int]:
        found: frozenset[int] = frozenset()
        for one in states:
            assert not found & one.tasks, "a task is counted twice"
            found |= one.tasks
        return found


def _one(head: int) -> Interval:
    return Interval(head, head + 1)


__all__ = ["Fold", "Key", "Ledger"]
