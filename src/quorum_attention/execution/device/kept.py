"""Host memory of results that is page-locked, and kept for the next call when they are freed.

To touch and to lock a gibibyte of fresh memory takes 0.05 s of 16 cores, and calls to the driver
wait meanwhile. A call of 0.1 s cannot hide that. So what a result lay in is kept, touched and
locked as one piece, up to a limit. It is given back when a later call has not used it for a while,
or when host memory is short.

A result that lies in such memory is page-locked for as long as it lives. A copy to a device that
its owner began without waiting for it may still be under way when the result is freed: so before
memory is used again, or unlocked, the host waits for every device.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

# What is kept at most, and of the host's memory.
_MOST_BYTES = 4 << 30
_MOST_OF_HOST = 1 / 32
# What no call has used for so many seconds is given back by the next.
_SECONDS = 10.0
# A result takes memory of at most so many times its size.
_LARGEST_ROOM = 1.25


@dataclass(slots=True, eq=False)
class _Room:
    """Memory of one result after another.

    Attributes:
        memory: (n_bytes,) uint8, in host memory.
        locked: whether it is page-locked.
        freed: when its last result was freed.
    """

    memory: torch.Tensor
    locked: bool = False
    freed: float = 0.0


@dataclass(frozen=True, slots=True)
class Locker:
    """How memory is page-locked: ``lock`` (address, bytes) says whether it did, ``unlock`` undoes
    it, ``wait`` holds the host until no device copies any more."""

    lock: Callable[[int, int], bool]
    unlock: Callable[[int], object]
    wait: Callable[[], object]


def _most_bytes() -> int:
    try:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not Unix
        return 0
    return min(_MOST_BYTES, int(host * _MOST_OF_HOST))


@dataclass(eq=False)
class Kept:
    """The memory that is kept of results.

    Args:
        locker: how it is page-locked.
        most_bytes: how much is kept at most.
        clock: seconds.
    """

    locker: Locker
    most_bytes: int = field(default_factory=_most_bytes)
    clock: Callable[[], float] = time.monotonic
    # Appended to by whatever thread frees a result, in the middle of anything: no lock is taken.
    _freed: deque[_Room] = field(default_factory=deque)
    _free: list[_Room] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Of what is free; a little off where threads free results at the same time, until ``take``.
    _free_bytes: int = 0

    def __post_init__(self) -> None:
        if hasattr(os, "register_at_fork"):
            # A child has the parent's memory, but neither its locks nor its devices.
            mine = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _forget(mine()))

    def lend(self, memory: torch.Tensor) -> torch.Tensor:
        """``memory`` (n_bytes,) uint8 as a tensor whose memory is kept when it is freed, if it is
        not too large for that."""
        return (
            memory if memory.nbytes > self.most_bytes else self._lent(_Room(memory), memory.nbytes)
        )

    def take(self, n_bytes: int) -> torch.Tensor | None:
        """(n_bytes,) uint8 that is page-locked and was touched; None if nothing fits.

        What has been free for long is given back.
        """
        with self._lock:
            self._collect()
            room = self._fitting(n_bytes)
            if room is not None:
                self._free.remove(room)
            old = self._superfluous()
        try:
            if old or (room is not None and room.locked):
                self.locker.wait()
            self._unlock(old)
            if room is None:
                return None
            if not room.locked:
                room.locked = self.locker.lock(room.memory.data_ptr(), room.memory.nbytes)
        except BaseException:
            # An interrupt, maybe: what is locked must not be freed as it is.
            for one in old if room is None else (*old, room):
                self._freed.append(one)
            raise
        return self._lent(room, n_bytes) if room.locked else None

    def give_back(self) -> None:
        """Unlock and free all that is not in use."""
        with self._lock:
            self._collect()
            old, self._free, self._free_bytes = self._free, [], 0
        if old:
            self.locker.wait()
            self._unlock(old)

    def _lent(self, room: _Room, n_bytes: int) -> torch.Tensor:
        held = (ctypes.c_char * n_bytes).from_address(room.memory.data_ptr())
        # The tensor's storage holds this object, and frees it.
        weakref.finalize(held, self._came_back, room).atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)

    def _came_back(self, room: _Room) -> None:
        n_bytes = room.memory.nbytes
        if not room.locked and self._free_bytes + n_bytes > self.most_bytes:
            return  # it is freed
        room.freed = self.clock()
        self._free_bytes += n_bytes
        self._freed.append(room)

    def _collect(self) -> None:
        """Take in what was freed; under the lock."""
        while self._freed:
            self._free.append(self._freed.popleft())

    def _superfluous(self) -> list[_Room]:
        """Take out what nothing has used for long, and the oldest of what is too much; under the
        lock."""
        self._free.sort(key=lambda room: room.freed)
        too_much = sum(room.memory.nbytes for room in self._free) - self.most_bytes
        old: list[_Room] = []
        while self._free and (too_much > 0 or self.clock() - self._free[0].freed > _SECONDS):
            old.append(self._free.pop(0))
            too_much -= old[-1].memory.nbytes
        self._free_bytes = sum(room.memory.nbytes for room in self._free)
        return old

    def _fitting(self, n_bytes: int) -> _Room | None:
        """The smallest room that is large enough, and not too large."""
        fitting = [
            room for room in self._free if n_bytes <= room.memory.nbytes <= n_bytes * _LARGEST_ROOM
        ]
        return min(fitting, key=lambda room: (room.memory.nbytes, not room.locked), default=None)

    def _unlock(self, rooms: Iterable[_Room]) -> None:
        for room in rooms:
            if room.locked:
                room.locked = False
                self.locker.unlock(room.memory.data_ptr())


def _forget(kept: Kept | None) -> None:
    if kept is not None:
        kept._freed, kept._free, kept._lock = deque(), [], threading.Lock()
        kept._free_bytes = 0
