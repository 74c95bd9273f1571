"""Shared memory that this process makes: files without a name, which stay open for
other processes.

After a fork no process sees what another one writes: the program's results are put into
private memory then.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from dataclasses import dataclass
from functools import partial

import torch

from quorum_attention.devices.handles import TensorHandle, handle_in_open_file
from quorum_attention.execution.device.memory_advice import ask_for_huge_pages


@dataclass(slots=True, eq=False)
class SharedFile:
    """A file without a name, which this process made and has mapped.

    Attributes:
        descriptor: the descriptor of the open file.
        n_bytes: its size.
        is_result: whether the program has a result in it.
        is_private: whether this process writes to pages of its own since a fork.
    """

    descriptor: int
    n_bytes: int
    is_result: bool = False
    is_private: bool = False


# By the first address of the memory.
_memfd_of: dict[int, SharedFile] = {}


def alloc_shared(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in shared memory that nobody has touched yet.

    The memory has no name in /dev/shm and does not count against its size, which
    containers often have set low. Other processes open it through this process's open
    files.

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
    _memfd_of[start] = SharedFile(file, n_bytes)
    weakref.finalize(memory, _close, start)
    ask_for_huge_pages(flat)
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    tensor.set_(flat.untyped_storage(), 0, shape)  # type: ignore[call-overload]
    return tensor


def _close(start: int) -> None:
    os.close(_memfd_of.pop(start).descriptor)


def shared_file_of(tensor: torch.Tensor) -> SharedFile | None:
    """Return the file of this process that a tensor lies in, or None."""
    return _memfd_of.get(tensor.untyped_storage().data_ptr())


def handle_of(tensor: torch.Tensor) -> TensorHandle:
    """Return the handle of a tensor from ``alloc_shared``, or of a view of one."""
    start = tensor.untyped_storage().data_ptr()
    return handle_in_open_file(
        tensor, _memfd_of[start].descriptor, tensor.data_ptr() - start
    )


# Linux's numbers: PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, and
# MREMAP_MAYMOVE | MREMAP_FIXED.
_READ_AND_WRITE = 0x1 | 0x2
_PRIVATE = 0x2 | 0x4000
_TO_ADDRESS = 0x1 | 0x2


def _make_private(*, only_results: bool) -> None:
    """Put the program's results into private memory; in a forked process all shared
    memory.

    Both processes then see each result as it was at the fork, and copy a page when they
    write to it, as with all other memory. The files stay as they are: workers may still
    read them. Memory without a result stays shared in the process that has the workers.

    Raises:
        OSError: there is no memory for it.
    """
    for start, shared_file in list(_memfd_of.items()):
        if shared_file.is_private:
            continue
        if only_results and not shared_file.is_result:
            continue
        shared_file.is_private = True
        _map_privately(start, shared_file)


def _map_privately(start: int, shared_file: SharedFile) -> None:
    """Map a file privately at ``start``, where it is mapped.

    The file is mapped elsewhere first: if that fails, nothing has changed.

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
    mapped = libc.mmap(
        None, n_bytes, _READ_AND_WRITE, _PRIVATE, shared_file.descriptor, beginning
    )
    if mapped != failed:
        source = ctypes.c_void_p(mapped)
        target = ctypes.c_void_p(start)
        moved = libc.mremap(source, n_bytes, n_bytes, _TO_ADDRESS, target)
    if moved != start:
        raise OSError(
            ctypes.get_errno(),
            f"a result of several devices, {shared_file.n_bytes} bytes, is shared with "
            "a forked process, because it cannot be mapped privately",
        )


_make_results_private = partial(_make_private, only_results=True)
os.register_at_fork(
    before=_make_results_private,
    # Other threads may have got results in between.
    after_in_parent=_make_results_private,
    after_in_child=partial(_make_private, only_results=False),
)
