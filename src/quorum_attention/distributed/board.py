"""Words that the ranks of a group leave for each other in its store.

The store is where ranks found each other when the group was made (a server at one of them, or a
file). Asking it takes a tenth of a millisecond, so nobody does while all is well.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist


class Word(NamedTuple):
    """What a rank says that has failed.

    Attributes:
        number: of the pass.
        rank: that failed.
        text: its error.
        drains: whether it takes part in what is left of the pass, with content that means nothing,
            as soon as all ranks have seen this.
        sent: whether all its messages of the pass are on their way, as they should be.
    """

    number: int
    rank: int
    text: str
    drains: bool
    sent: bool = False


class Board:
    """The words of one group.

    Args:
        store: of the group.
        rank, ranks: of the group.
        made: the how manieth group it is of those that this store had, one after the other: a
            group that is destroyed and made again may have its name, and what was said in it is
            still there.
    """

    def __init__(self, store: Any, rank: int, ranks: int, made: int) -> None:
        self._store: Any = dist.distributed_c10d.PrefixStore(f"quorum_attention/{made}", store)
        self._rank, self._ranks = rank, ranks

    @classmethod
    def of(cls, group: dist.ProcessGroup, made: int) -> Board | None:
        """That of a group; None where it has no store."""
        store = _store_of(group)
        return None if store is None else cls(store, group.rank(), group.size(), made)

    @staticmethod
    def made(group: dist.ProcessGroup) -> int:
        """Asked once, by each rank, when it first uses a group: ``made``, the same on all of them,
        as all take part in the first call."""
        store = _store_of(group)
        if store is None:
            return 0
        try:
            return int(store.add(f"quorum_attention/made/{group.rank()}", 1))
        except Exception:
            return 0  # a store that keeps nothing

    @property
    def seconds(self) -> float:
        """For how long the store waits for ranks."""
        seconds: float = self._store.timeout.total_seconds()
        return seconds

    def first(self, number: int) -> bool:
        """Whether this rank is the first that fails in a pass."""
        return bool(self._store.add(f"failed/{number}", 1) == 1)

    def tell(self, word: Word) -> None:
        """Leave a word of this rank's failure, in place of any before."""
        self._store.set("word", json.dumps(word))

    def word(self) -> Word | None:
        """The last that was left; None: there is none."""
        if not self._store.check(["word"]):
            return None
        found = json.loads(self._store.get("word"))
        return Word(*found) if found else None

    def withdraw(self, number: int) -> None:
        """Say that this rank takes part again: its word of a pass is no longer of interest."""
        with suppress(Exception):
            word = self.word()
            if word is not None and (word.number, word.rank) == (number, self._rank):
                self._store.set("word", "[]")
            keys = [f"seen/{number}/{rank}" for rank in range(self._ranks)]
            for key in (*keys, f"failed/{number}"):
                self._store.delete_key(key)

    def see(self, number: int) -> None:
        """Say that this rank knows of a pass's failure."""
        self._store.set(f"seen/{number}/{self._rank}", "1")

    def all_see(self, number: int) -> bool:
        """Whether all other ranks know of it."""
        others = (rank for rank in range(self._ranks) if rank != self._rank)
        return bool(self._store.check([f"seen/{number}/{rank}" for rank in others]))

    def wait(self, number: int, time: int, what: str) -> None:
        """Say what this rank waits for, for the ``time``-th time."""
        self._store.set(f"waits/{self._rank}", json.dumps([number, time, what]))

    def waiting(self) -> dict[int, tuple[int, int, str]]:
        """What the other ranks said last that they wait for: pass, time, and what."""
        found = {}
        for rank in range(self._ranks):
            key = f"waits/{rank}"
            if rank != self._rank and self._store.check([key]):
                number, time, what = json.loads(self._store.get(key))
                found[rank] = (number, time, what)
        return found


def _store_of(group: dist.ProcessGroup) -> Any:
    try:
        return dist.distributed_c10d._get_process_group_store(group)
    except Exception:
        return None


__all__ = ["Board", "Word"]
