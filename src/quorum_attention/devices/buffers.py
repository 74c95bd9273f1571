"""Tensors that several processes have: in shared memory, in a mapped file, or on a CUDA device.

Shared memory of results and of copies is kept for the next call when they are freed: its pages are
made then, and workers have it mapped and page-locked. To do that anew takes them a tenth of the
time of a long call. It is kept until calls have had no use for it for a while, or pools are closed.
"""

from __future__ import annotations

import errno
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.multiprocessing

from quorum_attention.call.mapped import Mappings
from quorum_attention.execution.device.cuda import Handed
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.execution.device.page_locks import (
    WORTH_LOCKING_BYTES,
    Locker,
    PinnedPool,
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
    path = f"/proc/{os.getpid()}/fd/{file}"
    shape, strides = tuple(tensor.shape), tensor.stride()
    offset = tensor.data_ptr() - start
    return InFile(path, offset, shape, strides, tensor.dtype, True, file=file_id(file))


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
    shape, strides = tuple(tensor.shape), tensor.stride()
    offset = int(tensor.storage_offset()) * tensor.element_size()
    path = f"/proc/{os.getpid()}/fd/{file}"
    return InFile(path, offset, shape, strides, tensor.dtype, True, file=file_id(file))


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
    shape, strides = tuple(tensor.shape), tensor.stride()
    return InFile(path, offset, shape, strides, tensor.dtype, written, file=now)


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


__all__ = [
    "FileId", "Handle", "InFile", "Shared", "file_id", "give_back", "in_file", "kept_room",
    "made_for", "of_host", "opened", "room",
]  # fmt: skip
