"""Tensors that several processes have: in shared memory, in a mapped file, or on a CUDA device.

Shared memory of results and of copies is kept for the next call when they are freed: its pages are
made then, and workers have it mapped and page-locked. To do that anew takes them a tenth of the
time of a long call. It is kept until calls have had no use for it for a while, or pools are closed.

Mapping a gibibyte, page after page, takes 0.1 to 0.2 s, and the backward reads what the forward has
read. So a worker keeps what its last passes had mapped until others have had no use for it, or the
other process has freed it. A worker of a device that copies from and to page-locked memory locks
its parts of it as wholes, and keeps them so: a pass that locked piece after piece beside its copies
took 1.46 s, one over memory that was locked 1.31 (an H200, 2 GiB). A result that nobody has touched
is the exception: the driver would make its pages, one after the other, before anything is computed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock, Thread
from types import TracebackType

import numpy as np
import torch
import torch.multiprocessing

from quorum_attention.call.overlap import Mappings
from quorum_attention.execution.device.cuda import Handed
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.execution.device.page_locks import (
    PAGE_BYTES,
    WORTH_LOCKING_BYTES,
    Locker,
    PinnedPool,
    addresses,
    ask_for_huge_pages,
)

# How much memory is kept at most, also of the host's.
_MOST_BYTES, _MOST_OF_HOST = 8 << 30, 1 / 16


@dataclass(frozen=True, slots=True)
class InFile:
    """A tensor that is mapped from a file; processes map it for themselves.

    Attributes:
        path: of the file.
        offset: of its first byte.
        shape, strides: in elements.
        dtype: of the tensor.
        written: whether it is written to.
        file: which file it is, from ``file_id``: the path may lead to another one by now. None:
            whichever is there.
    """

    path: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    written: bool
    file: FileId | None = None

    @classmethod
    def of(
        cls, tensor: torch.Tensor, path: str, offset: int, written: bool, file: FileId
    ) -> InFile:
        """A tensor that begins at a byte of a file."""
        return cls(path, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype, written, file)

    @property
    def in_memory(self) -> bool:
        """Whether it is shared memory of another process."""
        return self.path.startswith("/proc/")

    def open(self, mode: str = "") -> torch.Tensor:
        """Map it here.

        Args:
            mode: as NumPy has it; "": "r+" where it is written to, otherwise "c".

        Raises:
            MemoryError: there is no room for it.
            OSError: another file is there by now.
        """
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        mode = mode or ("r+" if self.written else "c")
        spanned = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1
        n_bytes = spanned * self.dtype.itemsize
        flags, opened_as = (os.O_RDWR, "r+b") if mode == "r+" else (os.O_RDONLY, "rb")
        with os.fdopen(self.descriptor(flags), opened_as) as file:
            try:
                raw = np.memmap(file, np.uint8, mode, self.offset, n_bytes)  # type: ignore[call-overload]
            except OSError as error:
                if error.errno == errno.ENOMEM:
                    raise MemoryError(f"{n_bytes} bytes of {self.path} were not mapped") from error
                raise
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat: torch.Tensor = torch.from_numpy(raw)
        return flat.view(self.dtype).as_strided(self.shape, self.strides)

    def descriptor(self, flags: int) -> int:
        """The file, opened.

        Raises:
            OSError: it cannot be opened, or another file is there by now.
        """
        found = os.open(self.path, flags | os.O_NONBLOCK)  # a pipe is not waited for
        if self.file is not None and not _is_same(self.file, file_id(found)):
            os.close(found)
            raise OSError(f"{self.path} is another file than the one that was opened before")
        return found


FileId = tuple[str, int, int]
"""The name of a machine, and the numbers that it has for a file and for the file's device."""


def file_id(file: int | str) -> FileId:
    """Which file a descriptor or a path leads to."""
    seen = os.stat(file)
    return os.uname().nodename, seen.st_dev, seen.st_ino


def _is_same(one: FileId, other: FileId) -> bool:
    # Each machine has numbers of its own for devices, of a network file system as well.
    return one == other or (one[0] != other[0] and one[2] == other[2])


Handle = torch.Tensor | InFile | Handed
Make = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(slots=True)
class Shared:
    """A tensor as other processes get it.

    Attributes:
        handle: what is sent; a tensor in shared memory or on a CUDA device is sent by its handle.
        tensor: the same memory here.
        copied_bytes: copied into shared memory, because its own was not.
    """

    handle: Handle
    tensor: torch.Tensor
    copied_bytes: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor, mappings: Mappings, make: Make | None = None) -> Shared:
        """An input, copied into shared memory if other processes cannot have its memory; ``make``
        makes that memory."""
        found = _as_it_is(tensor, mappings, written=False)
        if found is not None:
            return cls(found, tensor)
        copy = (make or room)(tuple(tensor.shape), tensor.dtype)
        copy.copy_(tensor)
        return cls(_as_it_is(copy, mappings) or copy, copy, copy.nbytes)

    @classmethod
    def written(cls, tensor: torch.Tensor, mappings: Mappings) -> Shared:
        """A given result; in shared memory of its own if others cannot write to it (``tensor`` then
        is that memory, to be copied at the end)."""
        found = _as_it_is(tensor, mappings, written=True)
        if found is not None:
            return cls(found, tensor)
        return cls.made(room(tuple(tensor.shape), tensor.dtype))

    @classmethod
    def made(cls, tensor: torch.Tensor) -> Shared:
        """A tensor from ``made_for``, or a view of one."""
        return cls(_in_room(tensor) or tensor, tensor)


def room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in shared memory that nobody has touched yet; it reads as zeros.

    Raises:
        RuntimeError: shared memory (/dev/shm on Linux) has no room for it.
    """
    n_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
    if n_bytes and hasattr(os, "memfd_create"):
        storage = _nameless(n_bytes).untyped_storage()
    else:
        storage = torch.UntypedStorage._new_shared(n_bytes, device="cpu")
    made = torch.empty(0, dtype=dtype, device="cpu")
    made.set_(storage, 0, shape)  # type: ignore[call-overload]
    return made


# The memory that this process made without a name: first address -> (address after it, file).
_rooms: dict[int, tuple[int, int]] = {}


def _nameless(n_bytes: int) -> torch.Tensor:
    """Shared memory, (n_bytes,) uint8, that has no name in /dev/shm and does not count against its
    size, which containers often have set low. Others open it through this process's open files."""
    file = os.memfd_create("quorum-attention")
    try:
        os.ftruncate(file, n_bytes)
        memory = mmap.mmap(file, n_bytes)
    except BaseException:
        os.close(file)
        raise
    made: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8)
    start = made.data_ptr()
    _rooms[start] = start + n_bytes, file
    weakref.finalize(memory, _forget, start, file)
    ask_for_huge_pages(made)
    return made


def _forget(start: int, file: int) -> None:
    del _rooms[start]
    os.close(file)


def _in_room(tensor: torch.Tensor) -> InFile | None:
    """The tensor as a part of memory made by ``room``."""
    if not on_host(tensor.device):
        return None
    start = tensor.untyped_storage().data_ptr()
    if start not in _rooms:
        return None
    _, file = _rooms[start]
    path, offset = f"/proc/{os.getpid()}/fd/{file}", tensor.data_ptr() - start
    return InFile.of(tensor, path, offset, True, file_id(file))


def _opened_here(tensor: torch.Tensor) -> InFile | None:
    """Torch's shared memory as a file that this process has open; None where there is no such file.

    What torch sends instead, a copy of the file's number, outlives a receiver that was killed.
    """
    by_number = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    if not (on_host(tensor.device) and by_number and os.path.isdir("/proc/self/fd")):
        return None
    file, _ = tensor.untyped_storage()._share_fd_cpu_()
    if file < 0:
        return None  # an ordinary file, closed once it was mapped (torch.from_file)
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return InFile.of(tensor, f"/proc/{os.getpid()}/fd/{file}", offset, True, file_id(file))


def _as_it_is(tensor: torch.Tensor, mappings: Mappings, written: bool = False) -> Handle | None:
    """The tensor as others can have it without a copy; None if they cannot."""
    if not on_host(tensor.device):
        return tensor if tensor.is_shared() else None
    if not tensor.is_shared():
        return _in_room(tensor) or in_file(tensor, mappings, written)
    found = _opened_here(tensor) or in_file(tensor, mappings, written)
    # What lies in a file torch cannot send as it is.
    by_torch = found is None and tensor.numel() and mappings.in_file(tensor) is None
    return tensor if by_torch else found


def made_for(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A result that workers can write to, on ``device``; nobody has touched it yet."""
    if on_host(device):
        return room(tuple(shape), dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def opened(handle: Handle) -> torch.Tensor:
    """The tensor of a handle, in the process that received it."""
    return handle if isinstance(handle, torch.Tensor) else handle.open()


def in_file(tensor: torch.Tensor, mappings: Mappings, written: bool) -> InFile | None:
    """The tensor as a part of a file that other processes can open and see the same bytes in."""
    found = mappings.in_file(tensor)
    if found is None:
        return None
    mapping, offset = found
    path = mapping.path
    # A private map that was written to differs from its file.
    if path is None or not mapping.shared or (written and not mapping.writable):
        return None
    try:
        now = file_id(path)
    except OSError:
        return None
    # A file of that name may be another one by now.
    _, device, inode = now
    if (f"{os.major(device):02x}:{os.minor(device):02x}", inode) != mapping.file:
        return None
    return InFile.of(tensor, path, offset, written, now)


def of_host(share: float) -> int:
    """Bytes that are such a share of the host's memory; 0 where that is not known."""
    try:
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * share)
    except (AttributeError, ValueError, OSError):  # not Unix
        return 0


# Workers lock it, each for itself: here there is nothing to lock, and nobody to wait for. No worker
# reads or writes after its pass.
_kept = PinnedPool(
    Locker(lambda address, n: True, lambda address: None, lambda: None),
    min(_MOST_BYTES, of_host(_MOST_OF_HOST)),
)


def kept_room(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """A tensor in shared memory that is kept when it is freed, and whether nobody has touched it.
    What it holds is anything.

    Raises:
        RuntimeError: shared memory has no room for it.
    """
    n_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
    if n_bytes < WORTH_LOCKING_BYTES or not hasattr(os, "memfd_create"):
        return room(tuple(shape), dtype), True
    found = _kept.take(n_bytes)
    if found is not None:
        return found.view(dtype).view(tuple(shape)), False
    return _kept.lend(room((n_bytes,), torch.uint8)).view(dtype).view(tuple(shape)), True


def give_back() -> None:
    """Free what is kept and not in use."""
    _kept.give_back()


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
        locked: addresses [start, stop) that are page-locked; an empty range: nothing is.
        refused: whether the system did not lock it.
    """

    memory: torch.Tensor
    path: str
    used: bool = True
    passes: int = 0
    unused: int = 0
    locked: tuple[int, int] = (0, 0)
    refused: bool = False

    @property
    def stop(self) -> int:
        """The address after its last byte."""
        return self.memory.data_ptr() + self.memory.nbytes

    @property
    def locked_bytes(self) -> int:
        return self.locked[1] - self.locked[0]


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
        """Page-lock tensors of a pass, after ``forget_unused``, each as a whole; results only where
        an earlier pass has had them. Nothing is copied from or to them meanwhile.

        Afterwards all of a tensor is locked here, or nothing.
        """
        if self._locker is None:
            return
        for tensor, least in (*((t, 1) for t in inputs), *((t, 2) for t in results)):
            if not on_host(tensor.device) or not tensor.nbytes:
                continue
            start, stop = addresses(tensor)
            every = self._every.values()
            one = next((m for m in every if m.memory.data_ptr() <= start < m.stop), None)
            if one is not None:
                may = one.passes >= least and stop - start >= WORTH_LOCKING_BYTES
                start = start // PAGE_BYTES * PAGE_BYTES
                stop = min(-(-stop // PAGE_BYTES) * PAGE_BYTES, one.stop)
                self._lock(one, start, stop, may and not one.refused)

    def unlock(self) -> None:
        """Unlock everything."""
        for one in self._every.values():
            self._unlock(one)

    def _lock(self, one: _Mapping, start: int, stop: int, may: bool) -> None:
        """Lock a range, if it may be, together with what is locked already: no copy may reach from
        a locked range into another, or beyond it."""
        low, high = one.locked
        if low <= start and stop <= high:
            return
        both = (min(low, start), max(high, stop)) if low < high else (start, stop)
        if may and self._has_room(both[1] - both[0] - one.locked_bytes):
            self._unlock(one)
            assert self._locker is not None
            if self._locker.lock(both[0], both[1] - both[0]):
                one.locked = both
            else:
                one.refused = True
        elif low < stop and start < high:
            self._unlock(one)

    def _has_room(self, n_bytes: int) -> bool:
        """Whether so much more may be locked; unlocks what passes have had no use for."""
        every = sum(one.locked_bytes for one in self._every.values())
        for one in sorted(self._every.values(), key=lambda one: -one.unused):
            if every + n_bytes <= self._most_bytes or not one.unused:
                break
            every -= one.locked_bytes
            self._unlock(one)
        return every + n_bytes <= self._most_bytes

    def _unlock(self, one: _Mapping) -> None:
        if one.locked_bytes:
            assert self._locker is not None
            self._locker.unlock(one.locked[0])
            one.locked = 0, 0

    def _forget(self, name: FileId) -> None:
        self._unlock(self._every.pop(name))


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


__all__ = [
    "FileId", "Handle", "InFile", "MappedBuffers", "Prefault", "Shared", "file_id", "give_back",
    "in_file", "kept_room", "made_for", "of_host", "opened", "room",
]  # fmt: skip
