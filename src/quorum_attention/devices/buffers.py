"""Tensors that several processes have: in shared memory or in a mapped file.

Shared memory of results and of copies is kept for the next call when they are freed: its pages are
made then, and workers have it mapped and page-locked. To do that anew takes them a tenth of the
time of a long call. It is kept until calls have had no use for it for a while, or pools are closed.

Mapping a gibibyte, page after page, takes 0.1 to 0.2 s, and the backward reads what the forward has
read. So a worker keeps what passes had mapped until the other process has freed it. A worker of a
device that copies from and to page-locked memory locks it as a whole, and keeps it so: a pass that
locked piece after piece beside its copies took 1.46 s, one over memory that was locked 1.31 (an
H200, 2 GiB). It has the inputs of others at hand then, if one of them is lost. A result that nobody
has touched is not locked: the driver would make its pages, one after the other, before anything is
computed.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.multiprocessing

from quorum_attention.arithmetic import round_up
from quorum_attention.call.overlap import Mappings
from quorum_attention.execution.device.host_memory import (
    PAGE_BYTES,
    ask_for_huge_pages,
    bytes_of_host,
)
from quorum_attention.execution.device.lookup import BACKENDS, HOST, on_host
from quorum_attention.execution.device.page_locks import WORTH_LOCKING_BYTES
from quorum_attention.execution.device.pinned_pool import Locker, PinnedPool
from quorum_attention.threads import NO_THREAD

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
        file: which file it is, from ``file_id``: the path may lead to another one by now.
    """

    path: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    written: bool
    file: FileId

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

    def open(self) -> torch.Tensor:
        """Map it here, to be read unless it is written to.

        Raises:
            OSError: there is no room for it, or another file is there by now.
        """
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        access = mmap.ACCESS_WRITE if self.written else mmap.ACCESS_READ
        with self.opened(os.O_RDWR if self.written else os.O_RDONLY) as file:
            return self.within(mmap.mmap(file, 0, access=access))

    def within(self, memory: mmap.mmap) -> torch.Tensor:
        """The tensor in a mapping of the whole file."""
        spanned = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat: torch.Tensor = torch.frombuffer(
                memory, dtype=self.dtype, count=spanned, offset=self.offset
            )
        return flat.as_strided(self.shape, self.strides)

    @contextmanager
    def opened(self, flags: int) -> Iterator[int]:
        """The file's descriptor.

        Raises:
            OSError: it cannot be opened, or another file is there by now.
        """
        file = os.open(self.path, flags | os.O_NONBLOCK)  # a pipe is not waited for
        try:
            if not _is_same(self.file, file_id(file)):
                raise OSError(f"{self.path} is another file than the one that was opened before")
            yield file
        finally:
            os.close(file)


FileId = tuple[str, int, int]
"""The name of a machine, and the numbers that it has for a file and for the file's device."""


def file_id(file: int | str) -> FileId:
    """Which file a descriptor or a path leads to."""
    seen = os.stat(file)
    return os.uname().nodename, seen.st_dev, seen.st_ino


def _id_at(path: str) -> FileId:
    """Which file a path leads to; of none, an id that no file has."""
    try:
        return file_id(path)
    except OSError:
        return "", 0, 0


def _is_same(one: FileId, other: FileId) -> bool:
    # Each machine has numbers of its own for devices, of a network file system as well.
    return one == other or (one[0] != other[0] and one[2] == other[2])


Handles = Mapping[str, InFile]


def share(
    tensor: torch.Tensor, mappings: Callable[[], Mappings], written: bool = False
) -> tuple[InFile, torch.Tensor]:
    """An input, or a result that is given, as other processes get it, and the same memory here:
    shared memory of its own if they cannot have the tensor's as it is. What is written there is
    copied at the end."""
    handle = _as_it_is(tensor, mappings, written) if on_host(tensor.device) else None
    if handle is not None:
        return handle, tensor
    own = shared_memory(tensor.shape, tensor.dtype, tensor.device)
    return handle_of(own), own if written else own.copy_(tensor)


@dataclass(slots=True, eq=False)
class _SharedFile:
    """A file without a name, which this process made and has mapped.

    Attributes:
        number: of the open file.
        n_bytes: its size.
        is_result: whether the program has a result in it.
        is_private: whether a fork was since, and this process writes to pages of its own.
    """

    number: int
    n_bytes: int
    is_result: bool = False
    is_private: bool = False


# By the first address of the memory.
_shared_files: dict[int, _SharedFile] = {}


def room(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in shared memory that nobody has touched yet; it reads as zeros.

    It has no name in /dev/shm and does not count against its size, which containers often have set
    low. Others open it through this process's open files.

    Raises:
        OSError: there is no memory or no file for it.
    """
    n_bytes = max(1, math.prod(shape) * dtype.itemsize)
    file = os.memfd_create("quorum-attention")
    try:
        os.ftruncate(file, n_bytes)
        memory = mmap.mmap(file, n_bytes)
    except BaseException:
        os.close(file)
        raise
    flat: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8)
    start = flat.data_ptr()
    _shared_files[start] = _SharedFile(file, n_bytes)
    weakref.finalize(memory, _forget, start)
    ask_for_huge_pages(flat)
    made = torch.empty(0, dtype=dtype, device="cpu")
    made.set_(flat.untyped_storage(), 0, shape)  # type: ignore[call-overload]
    return made


def _forget(start: int) -> None:
    os.close(_shared_files.pop(start).number)


def handle_of(tensor: torch.Tensor) -> InFile:
    """The handle of a tensor from ``shared_memory``, or of a view of one."""
    start = tensor.untyped_storage().data_ptr()
    return _opened_here(tensor, _shared_files[start].number, tensor.data_ptr() - start)


def _opened_here(tensor: torch.Tensor, file: int, offset: int) -> InFile:
    """A tensor in a file that this process has open."""
    path = f"/proc/{os.getpid()}/fd/{file}"
    return InFile.of(tensor, path, offset, True, file_id(file))


def _as_it_is(
    tensor: torch.Tensor, mappings: Callable[[], Mappings], written: bool
) -> InFile | None:
    """The tensor as others can have it without a copy; None if they cannot."""
    shared_file = _shared_files.get(tensor.untyped_storage().data_ptr())
    if shared_file is not None and not shared_file.is_private:
        return handle_of(tensor)
    # What torch itself sends, a copy of the file's number, outlives a receiver that was killed.
    if tensor.is_shared() and torch.multiprocessing.get_sharing_strategy() == "file_descriptor":
        file, _ = tensor.untyped_storage()._share_fd_cpu_()
        if file >= 0:  # else an ordinary file, closed once it was mapped (torch.from_file)
            return _opened_here(tensor, file, int(tensor.storage_offset()) * tensor.element_size())
    return in_file(tensor, mappings(), written)


def in_file(tensor: torch.Tensor, mappings: Mappings, written: bool) -> InFile | None:
    """The tensor as a part of a file that other processes can open and see the same bytes in."""
    found = mappings.position_in_file(tensor)
    if found is None:
        return None
    mapping, offset = found
    path = mapping.path
    # A private map that was written to differs from its file.
    if path is None or not mapping.shared or (written and not mapping.writable):
        return None
    # A file of that name may be another one by now.
    _, device, inode = now = _id_at(path)
    if (f"{os.major(device):02x}:{os.minor(device):02x}", inode) != mapping.file:
        return None
    return InFile.of(tensor, path, offset, written, now)


_MOST_KEPT = min(_MOST_BYTES, bytes_of_host(_MOST_OF_HOST))
# Workers lock it, each for itself: here there is nothing to lock, and nobody to wait for. No worker
# reads or writes after its pass.
_UNLOCKED = Locker(lambda address, n: True, lambda address: None, lambda: None)


@cache
def _kept_for(kind: str) -> PinnedPool:
    """What is kept of memory that this process copies to and from a kind of devices."""
    locked = BACKENDS[kind].pinned
    locker = _UNLOCKED if locked is None else locked.locker
    return PinnedPool(locker, _MOST_KEPT, may_keep=_result_is_gone)


def shared_memory(
    shape: Sequence[int], dtype: torch.dtype, home: torch.device = HOST
) -> torch.Tensor:
    """A tensor in shared memory that is kept when it is freed. What it holds is anything.

    Args:
        home: where the tensor is whose copy it holds.

    Raises:
        OSError: shared memory has no room for it.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes < WORTH_LOCKING_BYTES:
        return room(tuple(shape), dtype)
    kept = _kept_for(home.type)
    found = kept.take(n_bytes)
    if found is None:
        found = kept.lend(room((n_bytes,), torch.uint8))
    return found.view(dtype).view(tuple(shape))


def shared_result(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ``shared_memory`` for a result. After a fork each process has its own.

    Raises:
        OSError: shared memory has no room for it.
    """
    result = shared_memory(shape, dtype)
    shared_file = _shared_files.get(result.untyped_storage().data_ptr())
    if shared_file is not None:  # an empty tensor has no memory
        shared_file.is_result = True
    return result


def _result_is_gone(memory: torch.Tensor) -> bool:
    """Note that the program has let go of a result. Return whether its memory may have another."""
    shared_file = _shared_files[memory.data_ptr()]
    shared_file.is_result = False
    return not shared_file.is_private


def give_back() -> None:
    """Free what is kept and not in use."""
    for kind in BACKENDS:
        _kept_for(kind).give_back()


# Linux's numbers: PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, and MREMAP_MAYMOVE |
# MREMAP_FIXED.
_READ_AND_WRITE = 0x1 | 0x2
_PRIVATE = 0x2 | 0x4000
_TO_ADDRESS = 0x1 | 0x2


def _make_private(*, only_results: bool) -> None:
    """Put the program's results into private memory; and in a forked process all there is.

    Both processes then see each result as it was at the fork, and copy a page when they write to
    it, as of all other memory. The files stay as they are: workers may still read them. What is no
    result stays shared in the process that has the workers.

    Raises:
        OSError: there is no memory for it.
    """
    for start, shared_file in list(_shared_files.items()):
        if shared_file.is_private or (only_results and not shared_file.is_result):
            continue
        shared_file.is_private = True
        _map_privately(start, shared_file)


def _map_privately(start: int, shared_file: _SharedFile) -> None:
    """Map a file privately at ``start``, where it is mapped.

    It is mapped elsewhere first: if that fails, nothing has changed.

    Raises:
        OSError: there is no memory for it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mremap.restype = ctypes.c_void_p
    n_bytes = ctypes.c_size_t(shared_file.n_bytes)
    beginning = ctypes.c_long(0)
    failed = ctypes.c_void_p(-1).value
    moved = failed
    mapped = libc.mmap(None, n_bytes, _READ_AND_WRITE, _PRIVATE, shared_file.number, beginning)
    if mapped != failed:
        source = ctypes.c_void_p(mapped)
        target = ctypes.c_void_p(start)
        moved = libc.mremap(source, n_bytes, n_bytes, _TO_ADDRESS, target)
    if moved != start:
        raise OSError(
            ctypes.get_errno(),
            f"a result of several devices, {shared_file.n_bytes} bytes, is shared with a forked "
            "process, because it cannot be mapped privately",
        )


if hasattr(os, "register_at_fork"):
    _make_results_private = partial(_make_private, only_results=True)
    os.register_at_fork(
        before=_make_results_private,
        # Other threads may have got results in between.
        after_in_parent=_make_results_private,
        after_in_child=partial(_make_private, only_results=False),
    )

# Make the pages of a range as writing would; Linux 5.14 and later.
_MADV_POPULATE_WRITE = 23
_PIECE_BYTES, _LEAST_BYTES = 8 << 20, 8 << 20
_MOST_THREADS = 8


@dataclass(slots=True, eq=False)
class _Mapping:
    """A file in this process's memory.

    Attributes:
        memory: all of it.
        path: of the file.
        first: number of the pass that was the first to use it.
        locked: whether it is page-locked.
    """

    memory: mmap.mmap
    path: str
    first: int
    locked: bool = False

    @property
    def flat(self) -> torch.Tensor:
        """All of it, as bytes."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


class MappedBuffers:
    """The shared memory that a worker has mapped.

    Args:
        locker: how memory is page-locked; None: it is not.
        most_bytes: how much is kept locked at most.
    """

    def __init__(self, locker: Locker | None = None, most_bytes: int = 0) -> None:
        self._every: dict[FileId, _Mapping] = {}
        self._locker, self._most_bytes, self._pass = locker, most_bytes, 0

    def begin_pass(self) -> None:
        """A pass begins."""
        self.forget_gone()
        self._pass += 1

    def open(self, handle: InFile) -> torch.Tensor:
        """The tensor of a handle, for the pass that has begun.

        Raises:
            OSError: its file is gone, or another one has taken its place.
        """
        if not handle.in_memory or 0 in handle.shape:
            return handle.open()
        with handle.opened(os.O_RDWR) as file:
            # As long as it is mapped here, no other file has these numbers.
            if handle.file not in self._every:
                memory = mmap.mmap(file, 0)
                self._every[handle.file] = _Mapping(memory, handle.path, self._pass)
        return handle.within(self._every[handle.file].memory)

    def forget_gone(self) -> None:
        """Let go of what the other process has no more, and what no tensor uses here."""
        for name, one in list(self._every.items()):
            if _id_at(one.path) != name:
                self._unlock(self._every.pop(name))

    def lock(self, handle: InFile, *, result: bool = False) -> None:
        """Page-lock the memory of a tensor that was opened, as a whole: no copy may reach from a
        locked range beyond it. That of a result only where an earlier pass has had it."""
        one = self._every.get(handle.file)
        if one is None or self._locker is None or one.locked:
            return
        size = len(one.memory)
        locked = sum(len(each.memory) for each in self._every.values() if each.locked)
        fresh = result and one.first == self._pass
        if fresh or size < WORTH_LOCKING_BYTES or locked + size > self._most_bytes:
            return
        with prefaulting([one.flat], wait=True):  # the driver would map its pages one by one
            pass
        one.locked = self._locker.lock(one.flat.data_ptr(), round_up(size, PAGE_BYTES))
        if not one.locked:
            self._most_bytes = locked  # the system allows no more

    def unlock(self) -> None:
        """Unlock everything."""
        for one in self._every.values():
            self._unlock(one)

    def _unlock(self, one: _Mapping) -> None:
        if one.locked and self._locker is not None:
            self._locker.unlock(one.flat.data_ptr())
            one.locked = False


@contextmanager
def prefaulting(tensors: Iterable[torch.Tensor], *, wait: bool = False) -> Iterator[None]:
    """A ``with`` block, in which threads make the pages of tensors.

    Memory that nobody has written to has no pages yet, and a process that maps memory of another
    one has none of its pages in its tables. Locking such memory takes one core 0.2 to 0.5 s a
    gibibyte; many threads do that part in a tenth of the time. Nothing is written: others may be
    writing there. Everything is right without it: some systems do not offer it, or grant no thread.

    Args:
        tensors: in shared memory; those with gaps are left alone.
        wait: for all pages; else what is not begun at the end of the block is left.
    """
    pieces = list[tuple[int, int]]()
    for tensor in tensors:
        if tensor.nbytes >= _LEAST_BYTES and tensor.is_contiguous():
            start = round_up(tensor.data_ptr(), PAGE_BYTES)
            stop = (tensor.data_ptr() + tensor.nbytes) // PAGE_BYTES * PAGE_BYTES
            starts = range(start, stop, _PIECE_BYTES)
            pieces += [(at, min(_PIECE_BYTES, stop - at)) for at in starts]
    advise = ctypes.CDLL(None).madvise
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        with suppress(*NO_THREAD):
            for start, n in pieces:
                address, size = ctypes.c_void_p(start), ctypes.c_size_t(n)
                threads.submit(advise, address, size, _MADV_POPULATE_WRITE)
        try:
            yield
        finally:
            threads.shutdown(cancel_futures=not wait)
