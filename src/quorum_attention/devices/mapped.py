"""Shared memory of another process, mapped and page-locked once for as long as it is of use.

Mapping a gibibyte, page after page, takes 0.1 to 0.2 s. The backward reads what the forward has
read. So a worker keeps what its last passes had mapped until others have had no use for it, or the
other process has freed it.

A worker of a device that copies from and to page-locked memory locks its parts of it as wholes,
and keeps them so: a pass that locked piece after piece beside its copies took 1.46 s, one over
memory that was locked 1.31 (an H200, 2 GiB). A result that nobody has touched is the exception: the
driver would make its pages, one after the other, before anything is computed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from threading import Lock, Thread
from types import TracebackType

import torch

from quorum_attention.devices.buffers import FileId, Handle, InFile, file_id, opened
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.execution.device.page_locks import (
    PAGE_BYTES,
    WORTH_LOCKING_BYTES,
    Locker,
    addresses,
)

# What is mapped and locked stays so for so many passes that have no use for it: of a backward,
# until the next one. Results lie elsewhere from call to call, and are locked when they come there
# for a second time.
_PASSES = 4
# Make the pages of a range as writing would; Linux 5.14 and later.
_MADV_POPULATE_WRITE = 23
_PIECE_BYTES, _LEAST_BYTES = 2 << 20, 8 << 20
_MOST_THREADS = 8


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
    def stop(self) -> int:
        """The address after its last byte."""
        return self.memory.data_ptr() + self.memory.nbytes

    @property
    def locked_bytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


class MappedBuffers:
    """The shared memory that a worker has mapped.

    Args:
        locker: how memory is page-locked; None: it is not.
        most_bytes: how much is kept locked at most.
    """

    def __init__(self, locker: Locker | None = None, most_bytes: int = 0) -> None:
        self._every: dict[FileId, _Mapping] = {}
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
                self._every[name] = _Mapping(_mapped(file), handle.path)
        finally:
            os.close(file)
        mapping = self._every[name]
        mapping.used = True
        width = handle.dtype.itemsize
        memory = mapping.memory[handle.offset :]
        flat = memory[: len(memory) // width * width].view(handle.dtype)
        return flat.as_strided(handle.shape, handle.strides)

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
            one = next(
                (m for m in self._every.values() if m.memory.data_ptr() <= start < m.stop), None
            )
            if one is not None:
                may = one.passes >= least and stop - start >= WORTH_LOCKING_BYTES
                start = start // PAGE_BYTES * PAGE_BYTES
                stop = -(-stop // PAGE_BYTES) * PAGE_BYTES
                self._lock(one, start, stop, may and not one.refused)

    def unlock(self) -> None:
        """Unlock everything."""
        for one in self._every.values():
            self._unlock(one, one.ranges)

    def _lock(self, one: _Mapping, start: int, stop: int, may: bool) -> None:
        """Lock a range, if it may be, together with those that it overlaps: no copy may reach from
        a locked range into another, or beyond it."""
        if any(low <= start and stop <= high for low, high in one.ranges):
            return
        overlapping = [(low, high) for low, high in one.ranges if low < stop and start < high]
        self._unlock(one, overlapping)
        start = min([start, *(low for low, _ in overlapping)])
        stop = min(max([stop, *(high for _, high in overlapping)]), one.stop)
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


def _mapped(file: int) -> torch.Tensor:
    """All of a file, uint8; taken apart when nothing refers to it any more."""
    try:
        memory = mmap.mmap(file, os.fstat(file).st_size)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"shared memory was not mapped: {error}") from error
        raise
    made: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return made


def _is(path: str, name: FileId) -> bool:
    """Whether a path still leads to a file."""
    try:
        return file_id(path) == name
    except OSError:
        return False


class Prefault:
    """A ``with`` block, in which threads make the pages of tensors, of all from the first on.

    Memory that nobody has written to has no pages yet, and a process that maps memory of another
    one has none of its pages in its tables. Locking such memory takes one core 0.2 to 0.5 s a
    gibibyte; many threads do that part in a tenth of the time. Nothing is written: others may be
    writing there. Systems that do not offer it are left alone: everything is right without it.

    Args:
        tensors: in shared memory; those with gaps are left alone.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        here = [
            t
            for t in tensors
            if on_host(t.device) and t.nbytes >= _LEAST_BYTES and t.is_contiguous()
        ]
        pieces = [piece for tensor in here for piece in _pieces(tensor)]
        self._pieces = iter([(start, count) for _, start, count in sorted(pieces)])
        self._threads: list[Thread] = []
        self._many = bool(here) and sys.platform.startswith("linux")
        self._lock, self._over = Lock(), False

    def __enter__(self) -> Prefault:
        if self._many:
            advise = ctypes.CDLL(None, use_errno=True).madvise
            for _ in range(min(_MOST_THREADS, len(os.sched_getaffinity(0)))):
                thread = Thread(target=self._work, args=(advise,), name="pages", daemon=True)
                self._threads.append(thread)
                thread.start()
        return self

    def wait(self) -> None:
        """Wait until all pages are made."""
        for thread in self._threads:
            thread.join()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        self.wait()

    def _work(self, advise: Callable[..., int]) -> None:
        while not self._over:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            start, n_bytes = piece
            if advise(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), _MADV_POPULATE_WRITE):
                self._over = True


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[float, int, int]]:
    """Runs of whole pages within ``tensor``: how far into it, address and length."""
    start = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    stop = (tensor.data_ptr() + tensor.nbytes) // PAGE_BYTES * PAGE_BYTES
    for at in range(start, stop, _PIECE_BYTES):
        yield (at - start) / (stop - start), at, min(_PIECE_BYTES, stop - at)


__all__ = ["MappedBuffers", "Prefault"]
