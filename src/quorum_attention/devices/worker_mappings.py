"""The shared memory of the pool's process that a worker has mapped, and has
page-locked.

Mapping a gibibyte, page after page, takes 0.1 to 0.2 s, and the backward reads what the
forward has read. So a worker keeps what passes had mapped until the other process has
freed it.

A worker of a device that copies from and to page-locked memory locks each mapping as a
whole, and keeps it so: a pass that locked piece after piece beside its copies took 1.46
s, one over memory that was locked 1.31 (an H200, 2 GiB). The worker has the inputs of
other workers at hand then, if one of them is lost. A result that nobody has touched is
not locked: the driver would make its pages, one after the other, before anything is
computed.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.devices.handles import FileId, TensorHandle, file_id_at
from quorum_attention.devices.prefault import prefaulting
from quorum_attention.execution.device.host_memory import PAGE_BYTES
from quorum_attention.execution.device.page_locks import WORTH_LOCKING_BYTES
from quorum_attention.execution.device.pinned_pool import Locker


@dataclass(slots=True, eq=False)
class _Mapping:
    """A file in this process's memory.

    Attributes:
        memory: all of the file.
        path: the path of the file.
        first_pass: the number of the pass that was the first to use it.
        is_locked: whether it is page-locked.
    """

    memory: mmap.mmap
    path: str
    first_pass: int
    is_locked: bool = False

    @property
    def n_bytes(self) -> int:
        """The size of the file."""
        return len(self.memory)

    @property
    def tensor(self) -> torch.Tensor:
        """All of the file as bytes, (n_bytes,) uint8."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


class WorkerMappings:
    """The shared memory that a worker has mapped.

    Args:
        locker: how memory is page-locked; None if it is not.
        max_locked_bytes: how much is kept locked at most.
    """

    def __init__(self, locker: Locker | None = None, max_locked_bytes: int = 0) -> None:
        self._locker = locker
        self._max_locked_bytes = max_locked_bytes
        self._mappings: dict[FileId, _Mapping] = {}
        self._pass_number = 0

    def begin_pass(self) -> None:
        """Let go of what is gone, and count one more pass."""
        self.forget_gone()
        self._pass_number += 1

    def open(self, handle: TensorHandle) -> torch.Tensor:
        """Return the tensor of a handle, for the pass that has begun.

        Raises:
            OSError: its file is gone, or another one has taken its place.
        """
        if not handle.is_shared_memory or 0 in handle.shape:
            return handle.open()
        with handle.opened_file(os.O_RDWR) as file:
            # As long as it is mapped here, no other file has these numbers.
            mapping = self._mappings.get(handle.file)
            if mapping is None:
                memory = mmap.mmap(file, 0)
                mapping = _Mapping(memory, handle.path, self._pass_number)
                self._mappings[handle.file] = mapping
        return handle.tensor_in(mapping.memory)

    def forget_gone(self) -> None:
        """Let go of files that the other process has no more; tensors that use them
        keep them."""
        kept_mappings: dict[FileId, _Mapping] = {}
        for file, mapping in self._mappings.items():
            if file_id_at(mapping.path) == file:
                kept_mappings[file] = mapping
            else:
                self._unlock(mapping)
        self._mappings = kept_mappings

    def lock(self, handle: TensorHandle, *, is_result: bool = False) -> None:
        """Page-lock the file of a tensor that was opened, as a whole.

        No copy may reach from a locked range beyond it. The file of a result is locked
        only if an earlier pass has had it.
        """
        mapping = self._mappings.get(handle.file)
        if (
            mapping is None
            or self._locker is None
            or not self._may_lock(mapping, is_result)
        ):
            return
        with prefaulting([mapping.tensor], wait=True):
            pass  # the driver would make the pages one by one
        n_bytes = round_up(mapping.n_bytes, PAGE_BYTES)
        mapping.is_locked = self._locker.lock(mapping.tensor.data_ptr(), n_bytes)
        if not mapping.is_locked:
            self._max_locked_bytes = self._locked_bytes()  # the system allows no more

    def _may_lock(self, mapping: _Mapping, is_result: bool) -> bool:
        """Return whether a file is to be locked, and fits what may be locked."""
        if mapping.is_locked or mapping.n_bytes < WORTH_LOCKING_BYTES:
            return False
        is_first_use = mapping.first_pass == self._pass_number
        if is_result and is_first_use:
            return False
        n_bytes = self._locked_bytes() + mapping.n_bytes
        return n_bytes <= self._max_locked_bytes

    def _locked_bytes(self) -> int:
        return sum(
            mapping.n_bytes for mapping in self._mappings.values() if mapping.is_locked
        )

    def unlock(self) -> None:
        """Unlock everything."""
        for mapping in self._mappings.values():
            self._unlock(mapping)

    def _unlock(self, mapping: _Mapping) -> None:
        if mapping.is_locked and self._locker is not None:
            self._locker.unlock(mapping.tensor.data_ptr())
            mapping.is_locked = False
