"""Shared memory of another process, mapped once for as long as it is of use.

Mapping a gibibyte, page after page, takes 0.1 to 0.2 s, and taking it apart a tenth of that. The
backward reads what the forward has read. So a worker keeps what its last pass had open until
another pass has had no use for it, or the other process has freed it; and a thread takes mappings
apart, beside the next pass.

A worker of a device that copies from and to page-locked memory also locks its parts of it as
wholes, and keeps them so for a few passes. A pass over such memory, whose results had their pages
too, took 1.31 s where one that locked piece after piece beside its copies took 1.46 (an H200, 2
GiB). The exception is a result that nobody has touched: the driver would make its pages, one after
the other, before anything is computed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from quorum_attention.execution.device.lookup import on_host
from quorum_attention.execution.device.page_locks import (
    PAGE_BYTES,
    WORTH_LOCKING_BYTES,
    Locker,
    addresses,
)
from quorum_attention.pool.shared import FileId, Handle, InFile, file_id, opened

_FAILED = ctypes.c_void_p(-1).value
# What is open, or also locked, stays so for so many passes that have no use for it, where memory is
# locked: of a backward, until the next one. Results lie elsewhere from call to call, and are locked
# when they come there for a second time.
_PASSES = 4
# How much a worker keeps locked: of the host's memory.
_MOST_OF_HOST = 1 / 16


@dataclass(slots=True, eq=False)
class _Mapping:
    """A file in this process's memory.

    Attributes:
        memory: all of it, uint8.
        path: of the file.
        used: whether the pass that is beginning uses it.
        passes: how many have used it.
        unused: how many have had no use for it since.
        ranges: addresses [start, stop) that are page-locked, apart from each other.
        refused: whether the system did not lock it.
    """

    memory: torch.Tensor
    path: str
    used: bool = True
    passes: int = 0
    unused: int = 0
    ranges: list[tuple[int, int]] = field(default_factory=list)
    refused: bool = False

    @property
    def locked_bytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


def most_locked_bytes() -> int:
    """How much memory a worker keeps locked at most; nothing where the host's is not known."""
    if not hasattr(os, "sysconf"):
        return 0
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _MOST_OF_HOST)


class Openings:
    """The shared memory that a worker has open.

    Args:
        locker: how memory is page-locked; None: it is not.
        most_bytes: how much is kept locked at most.
    """

    def __init__(self, locker: Locker | None = None, most_bytes: int = 0) -> None:
        self._every: dict[FileId, _Mapping] = {}
        self._reaper = _Reaper()
        self._locker, self._most_bytes = locker, most_bytes

    def __bool__(self) -> bool:
        return bool(self._every)

    def open(self, handle: Handle) -> torch.Tensor:
        """The tensor of a handle.

        Raises:
            OSError: its file is gone, or another one has taken its place.
        """
        if not (isinstance(handle, InFile) and handle.in_memory and handle.written):
            return opened(handle)
        file = handle.descriptor(os.O_RDWR)
        try:
            # As long as it is mapped here, no other file has these numbers.
            name = file_id(file)
            if name not in self._every:
                memory = self._mapped(file, os.fstat(file).st_size)
                self._every[name] = _Mapping(memory, handle.path)
        finally:
            os.close(file)
        mapping = self._every[name]
        mapping.used = True
        memory = mapping.memory[handle.offset :]
        return memory[: len(memory) // handle.dtype.itemsize * handle.dtype.itemsize].view(
            handle.dtype
        ).as_strided(handle.shape, handle.strides)  # fmt: skip

    def forget_unused(self) -> None:
        """A pass has opened what it needs: let go of what the one before had beside that; where
        memory is locked a little later, if it is not gone."""
        for name, one in list(self._every.items()):
            one.unused = 0 if one.used else one.unused + 1
            one.passes += one.used
            most = _PASSES if self._locker is not None and _is(one.path, name) else 0
            if one.unused > most:
                self._forget(name)
            one.used = False

    def forget_gone(self) -> None:
        """Let go of what the other process has no more, and what no tensor uses here."""
        for name, one in list(self._every.items()):
            if not _is(one.path, name):
                self._forget(name)

    def lock(self, inputs: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """Page-lock tensors of a pass, after ``forget_unused``, each as one range; results only
        where an earlier pass has had them. Nothing is copied from or to them meanwhile.

        Afterwards all of a tensor is locked here, or nothing.
        """
        if self._locker is None:
            return
        for tensor, least in (*((t, 1) for t in inputs), *((t, 2) for t in results)):
            if not on_host(tensor.device) or not tensor.nbytes:
                continue
            start, stop = addresses(tensor)
            one = self._mapping(start)
            if one is not None:
                may = one.passes >= least and stop - start >= WORTH_LOCKING_BYTES
                start, stop = (
                    n * PAGE_BYTES for n in (start // PAGE_BYTES, -(-stop // PAGE_BYTES))
                )
                self._lock(one, start, stop, may and not one.refused)

    def unlock(self) -> None:
        """Unlock everything."""
        for one in self._every.values():
            self._unlock(one, one.ranges)

    def _mapping(self, address: int) -> _Mapping | None:
        for one in self._every.values():
            start = one.memory.data_ptr()
            if start <= address < start + one.memory.nbytes:
                return one
        return None

    def _lock(self, one: _Mapping, start: int, stop: int, may: bool) -> None:
        """Lock a range, if it may be, together with those that it overlaps: no copy may reach from
        a locked range into another, or beyond it."""
        if any(low <= start and stop <= high for low, high in one.ranges):
            return
        overlapping = [(low, high) for low, high in one.ranges if low < stop and start < high]
        self._unlock(one, overlapping)
        start = min([start, *(low for low, _ in overlapping)])
        stop = max([stop, *(high for _, high in overlapping)])
        stop = min(stop, one.memory.data_ptr() + one.memory.nbytes)
        if not may or not self._has_room(stop - start):
            return
        assert self._locker is not None
        if self._locker.lock(start, stop - start):
            one.ranges.append((start, stop))
        else:
            one.refused = True

    def _has_room(self, n_bytes: int) -> bool:
        """Whether so much more may be locked; unlocks what passes have had no use for."""
        every = sum(one.locked_bytes for one in self._every.values())
        for one in sorted(self._every.values(), key=lambda one: -one.unused):
            if every + n_bytes <= self._most_bytes or not one.unused:
                break
            every -= one.locked_bytes
            self._unlock(one, one.ranges)
        return every + n_bytes <= self._most_bytes

    def _unlock(self, one: _Mapping, ranges: list[tuple[int, int]]) -> None:
        for start, stop in list(ranges):
            assert self._locker is not None
            one.ranges.remove((start, stop))
            self._locker.unlock(start)

    def _forget(self, name: FileId) -> None:
        one = self._every.pop(name)
        self._unlock(one, one.ranges)

    def _mapped(self, file: int, n_bytes: int) -> torch.Tensor:
        """All of a file, (n_bytes,) uint8; taken apart when nothing refers to it any more."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
            ctypes.c_long,
        )  # fmt: skip
        both = mmap.PROT_READ | mmap.PROT_WRITE
        start = libc.mmap(None, n_bytes, both, mmap.MAP_SHARED, file, 0)
        if start is None or start == _FAILED:
            code, said = ctypes.get_errno(), f"shared memory of {n_bytes} bytes was not mapped"
            raise MemoryError(said) if code == errno.ENOMEM else OSError(code, said)
        memory = (ctypes.c_char * n_bytes).from_address(start)
        # Not at the end of the process, which takes it apart itself.
        weakref.finalize(memory, self._reaper.add, start, n_bytes).atexit = False
        made: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        return made


def _is(path: str, name: FileId) -> bool:
    """Whether a path still leads to a file."""
    try:
        return file_id(path) == name
    except OSError:
        return False


class _Reaper:
    """Takes mappings apart in a thread: the call does not hold the interpreter."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int]] = []
        # Reentrant: a collection of garbage may call ``add`` anywhere.
        self._lock = threading.RLock()
        self._works = False

    def add(self, start: int, n_bytes: int) -> None:
        """Take the mapping at this address apart."""
        with self._lock:
            self._waiting.append((start, n_bytes))
            if self._works:
                return
            self._works = True
        try:
            threading.Thread(target=self._work, name="unmapping", daemon=True).start()
        except RuntimeError:  # no thread may be had, for lack of memory maybe
            self._work()

    def _work(self) -> None:
        unmap = ctypes.CDLL(None).munmap
        while True:
            with self._lock:
                if not self._waiting:
                    self._works = False
                    return
                start, n_bytes = self._waiting.pop()
            unmap(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes))


__all__ = ["Openings", "most_locked_bytes"]
