"""Page-locked memory of freed results, kept for the results of later calls."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from quorum_attention.execution.device.host_memory import bytes_of_host

# Most memory that is kept: so many bytes, and such a share of the host's.
_MOST_BYTES = 4 << 30
_MOST_OF_HOST = 1 / 32
# The next call gives back memory that no call has used for so many seconds.
_KEPT_SECONDS = 10.0
# A result takes memory of at most so many times its size.
_LARGEST_FIT = 1.25


@dataclass(slots=True, eq=False)
class ResultMemory:
    """Memory of one result after another.

    Attributes:
        memory: (n_bytes,) uint8, in host memory.
        locked: whether it is page-locked.
        freed: when its last result was freed.
    """

    memory: torch.Tensor
    locked: bool = False
    freed: float = 0.0

    @property
    def n_bytes(self) -> int:
        """Its size."""
        return self.memory.nbytes


@dataclass(frozen=True, slots=True)
class Locker:
    """How memory is page-locked.

    Attributes:
        lock: locks (address, bytes); returns whether it did.
        unlock: undoes that, by address.
        wait: holds the host until no device copies any more.
    """

    lock: Callable[[int, int], bool]
    unlock: Callable[[int], object]
    wait: Callable[[], object]


def lock_until_freed(memory: torch.Tensor, locker: Locker) -> torch.Tensor | None:
    """Page-lock ``memory`` for as long as the returned tensor, or a view of it, lives.

    Args:
        memory: (n_bytes,) uint8 in host memory, at least one byte; it begins at a page.

    Returns:
        A tensor over the same memory; None if the system refuses to lock it.
    """
    address = memory.data_ptr()
    if not locker.lock(address, memory.nbytes):
        return None
    buffer = (ctypes.c_char * memory.nbytes).from_address(address)
    # The tensor's storage holds the buffer. The finalizer holds the memory until it is
    # unlocked.
    finalizer = weakref.finalize(buffer, _unlock_and_free, memory, locker)
    finalizer.atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _unlock_and_free(memory: torch.Tensor, locker: Locker) -> None:
    """Undo ``lock_until_freed``; the caller lets go of the memory."""
    # A copy that nobody waited for may still be under way.
    locker.wait()
    locker.unlock(memory.data_ptr())


@dataclass(eq=False)
class PinnedPool:
    """The memory of freed results, for as long as later calls use it.

    A result that lies in it is page-locked for as long as it lives. A copy to a device
    that its owner began without waiting for it may still be under way when the result
    is freed: so before memory is used again, or unlocked, the host waits for every
    device.

    Args:
        locker: how memory is page-locked.
        most_bytes: how much is kept at most.
        clock: seconds.
        may_keep: called when memory is freed; returns whether it may be used again.
    """

    locker: Locker
    most_bytes: int = min(_MOST_BYTES, bytes_of_host(_MOST_OF_HOST))
    clock: Callable[[], float] = time.monotonic
    may_keep: Callable[[torch.Tensor], bool] = lambda memory: True
    # Appended to by whatever thread frees a result, in the middle of anything: no lock
    # is taken, so it is changed by single operations of the list only.
    _free: list[ResultMemory] = field(default_factory=list)
    # By address: memory in use that ``take`` left to be locked later.
    _to_lock: dict[int, ResultMemory] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        os.register_at_fork(after_in_child=self._forget)

    def lend(self, memory: torch.Tensor) -> torch.Tensor:
        """``memory`` (n_bytes,) uint8 as a tensor whose memory is kept when it is
        freed, unless the memory is too large to be kept."""
        if memory.nbytes > self.most_bytes:
            return memory
        return self._lend(ResultMemory(memory), memory.nbytes)

    def take(self, n_bytes: int, *, lock_later: bool = False) -> torch.Tensor | None:
        """(n_bytes,) uint8 that is page-locked and was touched; None if nothing fits.

        Memory that has been free for long is given back, and the oldest of what is too
        much.

        Args:
            lock_later: leave memory that is not locked yet to ``PageLocks``, which
                finds it by ``unlocked_at``: to lock a gibibyte takes 0.05 s.
        """
        with self._lock:
            chosen = self._choose(n_bytes)
            surplus = self._surplus(chosen)
            taken = surplus if chosen is None else [*surplus, chosen]
            for pooled in taken:
                self._free.remove(pooled)
        try:
            self._give_back(surplus, chosen)
            if chosen is not None and not lock_later:
                self._lock_memory(chosen)
        except BaseException:
            # An interrupt, maybe: what is locked must not be freed as it is.
            self._free.extend(taken)
            raise
        if chosen is None or not (chosen.locked or lock_later):
            return None
        if not chosen.locked:
            self._to_lock[chosen.memory.data_ptr()] = chosen
        return self._lend(chosen, n_bytes)

    def _give_back(
        self, surplus: list[ResultMemory], chosen: ResultMemory | None
    ) -> None:
        """Unlock ``surplus``; copies from or to it, and from or to ``chosen``, have
        ended."""
        if surplus or (chosen is not None and chosen.locked):
            self.locker.wait()
        self._unlock(surplus)

    def _lock_memory(self, pooled: ResultMemory) -> None:
        """Page-lock memory that is not locked yet, if the system allows it."""
        if not pooled.locked:
            address = pooled.memory.data_ptr()
            pooled.locked = self.locker.lock(address, pooled.n_bytes)

    def unlocked_at(self, address: int) -> ResultMemory | None:
        """The memory in use that begins at ``address`` and was left to be locked
        later."""
        return self._to_lock.get(address)

    def give_back(self) -> None:
        """Unlock and free all that is not in use."""
        unused: list[ResultMemory] = []
        with self._lock:
            while self._free:
                unused.append(self._free.pop())
        if unused:
            self.locker.wait()
            self._unlock(unused)

    def _oldest_first(self) -> list[ResultMemory]:
        """The free memory, by when it was freed."""
        return sorted(self._free, key=lambda pooled: pooled.freed)

    def _choose(self, n_bytes: int) -> ResultMemory | None:
        """The smallest free memory that fits, not too large; one that is locked rather
        than not."""
        largest = n_bytes * _LARGEST_FIT
        fitting = [
            pooled
            for pooled in self._oldest_first()
            if n_bytes <= pooled.n_bytes <= largest
        ]
        return min(
            fitting,
            key=lambda pooled: (pooled.n_bytes, not pooled.locked),
            default=None,
        )

    def _surplus(self, chosen: ResultMemory | None) -> list[ResultMemory]:
        """The free memory to give back, without ``chosen``."""
        free = [pooled for pooled in self._oldest_first() if pooled is not chosen]
        too_much = sum(pooled.n_bytes for pooled in free) - self.most_bytes
        surplus: list[ResultMemory] = []
        for pooled in free:
            is_old = self.clock() - pooled.freed > _KEPT_SECONDS
            if too_much > 0 or is_old:
                surplus.append(pooled)
                too_much -= pooled.n_bytes
        return surplus

    def _lend(self, pooled: ResultMemory, n_bytes: int) -> torch.Tensor:
        """The first bytes of ``pooled`` as a tensor that hands the memory back when it
        is freed."""
        address = pooled.memory.data_ptr()
        buffer = (ctypes.c_char * n_bytes).from_address(address)
        # The tensor's storage holds this object, and frees it.
        finalizer = weakref.finalize(buffer, self._take_back, pooled)
        finalizer.atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _take_back(self, pooled: ResultMemory) -> None:
        """Keep memory whose result was freed, unless too much is kept already."""
        self._to_lock.pop(pooled.memory.data_ptr(), None)
        if not self.may_keep(pooled.memory):
            return
        # A copy, because another thread may append meanwhile.
        free_bytes = sum(free.n_bytes for free in tuple(self._free))
        fits = free_bytes + pooled.n_bytes <= self.most_bytes
        if pooled.locked or fits:
            pooled.freed = self.clock()
            self._free.append(pooled)

    def _unlock(self, memory: Iterable[ResultMemory]) -> None:
        """Undo the page locks of ``memory``."""
        for pooled in memory:
            if pooled.locked:
                pooled.locked = False
                self.locker.unlock(pooled.memory.data_ptr())

    def _forget(self) -> None:
        """In a child, which has the parent's memory, but neither its locks nor its
        devices."""
        self._free = []
        self._to_lock = {}
        self._lock = threading.Lock()
