"""Tensors of a call in shared memory, and as handles.

Shared memory of results and of copies is kept for the next call when they are freed:
its pages are made then, and workers have it mapped and page-locked. To do that anew
takes them a tenth of the time of a long call. The memory is kept until calls have had
no use for it for a while, or pools are closed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.multiprocessing

from quorum_attention.call.overlap import Mappings
from quorum_attention.devices.handles import (
    TensorHandle,
    handle_in_mapped_file,
    handle_in_open_file,
)
from quorum_attention.devices.shared_files import (
    alloc_shared,
    handle_of,
    shared_file_of,
)
from quorum_attention.execution.device.host_memory import bytes_of_host
from quorum_attention.execution.device.lookup import BACKENDS, HOST, on_host
from quorum_attention.execution.device.page_locks import WORTH_LOCKING_BYTES
from quorum_attention.execution.device.pinned_pool import Locker, PinnedPool

# Freed memory is kept up to this many bytes, and up to this share of the host's memory.
_MAX_BYTES = 8 << 30
_MAX_HOST_SHARE = 1 / 16
_MAX_KEPT_BYTES = min(_MAX_BYTES, bytes_of_host(_MAX_HOST_SHARE))
# Workers lock the memory, each for itself. Here there is nothing to lock, and nothing
# to wait for: no worker reads or writes after its pass.
_NO_LOCKS = Locker(lambda address, n_bytes: True, lambda address: None, lambda: None)


class SharedTensor(NamedTuple):
    """A tensor as other processes get it, and the same memory in this process."""

    handle: TensorHandle
    tensor: torch.Tensor


@cache
def _freed_memory(device_type: str) -> PinnedPool:
    """Return the pool of freed memory that this process copies to and from a kind of
    devices."""
    pinned = BACKENDS[device_type].pinned
    locker = _NO_LOCKS if pinned is None else pinned.locker
    return PinnedPool(locker, _MAX_KEPT_BYTES, may_keep=_release_result)


def shared_memory(
    shape: Sequence[int], dtype: torch.dtype, home: torch.device = HOST
) -> torch.Tensor:
    """Return an uninitialised tensor in shared memory that is kept when it is freed.

    Args:
        home: the device of the tensor whose copy it holds.

    Raises:
        OSError: shared memory has no room for it.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes < WORTH_LOCKING_BYTES:
        return alloc_shared(tuple(shape), dtype)
    freed_memory = _freed_memory(home.type)
    memory = freed_memory.take(n_bytes)
    if memory is None:
        memory = freed_memory.lend(alloc_shared((n_bytes,), torch.uint8))
    return memory.view(dtype).view(tuple(shape))


def shared_result(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of ``shared_memory`` for a result. After a fork each process has
    its own.

    Raises:
        OSError: shared memory has no room for it.
    """
    result = shared_memory(shape, dtype)
    shared_file = shared_file_of(result)
    if shared_file is not None:  # an empty tensor has no memory
        shared_file.is_result = True
    return result


def _release_result(memory: torch.Tensor) -> bool:
    """Note that the program has let go of a result. Return whether its memory may have
    another."""
    shared_file = shared_file_of(memory)
    assert shared_file is not None
    shared_file.is_result = False
    return not shared_file.is_private


def give_back() -> None:
    """Free the memory that is kept and not in use."""
    for device_type in BACKENDS:
        _freed_memory(device_type).give_back()


def to_handle(
    tensor: torch.Tensor, mappings: Callable[[], Mappings], writable: bool = False
) -> SharedTensor:
    """Return the handle of an input, or of a result that the caller gave, and its
    tensor here.

    The tensor is the very one if other processes can have its memory. Else it is a copy
    of an input, or uninitialised memory for a result, which is copied at the end.
    """
    if on_host(tensor.device):
        handle = _handle_without_copy(tensor, mappings, writable)
        if handle is not None:
            return SharedTensor(handle, tensor)
    shared = shared_memory(tensor.shape, tensor.dtype, tensor.device)
    if not writable:
        shared.copy_(tensor)
    return SharedTensor(handle_of(shared), shared)


def _handle_without_copy(
    tensor: torch.Tensor, mappings: Callable[[], Mappings], writable: bool
) -> TensorHandle | None:
    """Return the handle of a tensor, or None if other processes cannot have its
    memory."""
    shared_file = shared_file_of(tensor)
    if shared_file is not None and not shared_file.is_private:
        return handle_of(tensor)
    # Torch itself would send a copy of the descriptor, which outlives a receiver that
    # was killed.
    if (
        tensor.is_shared()
        and torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
    ):
        file, _ = tensor.untyped_storage()._share_fd_cpu_()
        if (
            file >= 0
        ):  # else an ordinary file, closed once it was mapped (torch.from_file)
            offset = int(tensor.storage_offset()) * tensor.element_size()
            return handle_in_open_file(tensor, file, offset)
    return handle_in_mapped_file(tensor, mappings(), writable)
