"""Where tensors lie, and how to allocate them there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from quorum_attention.errors import OutOfMemoryError, is_out_of_memory
from quorum_attention.execution.device.lookup import HOST, backend_of, on_host
from quorum_attention.execution.device.page_locks import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    WORTH_LOCKING_BYTES,
    ask_for_huge_pages,
)
from quorum_attention.sizes import format_bytes

# Less than this fits few huge pages.
_WORTH_HUGE_PAGES = 8 << 20

Home = Literal["device", "host"]
"""Where accumulators wait between tasks, as schedules name it."""


@dataclass(frozen=True, slots=True)
class Residency:
    """The memory of a device or of the host. (A memory-mapped file counts as host memory.)"""

    device: torch.device

    @classmethod
    def of_home(cls, home: Home, compute: torch.device) -> Residency:
        """The residency of accumulators whose home is ``home``, of a pass on ``compute``."""
        return cls(compute if home == "device" else HOST)

    def counts(self, compute: torch.device) -> bool:
        """Whether tensors here count against the budget of ``compute``.

        If they do not, they have to be copied to ``compute``.
        """
        return self.device == compute

    def lockable(self, compute: torch.device) -> bool:
        """Whether page-locking tensors here makes copies to ``compute`` faster."""
        return on_host(self.device) and not self.counts(compute) and backend_of(compute).pins

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> torch.Tensor:
        """An uninitialised tensor here; messages call it ``what``.

        Raises:
            OutOfMemoryError: host memory cannot hold it; says how much is missing.
        """
        backend = backend_of(self.device)
        if not backend.refuses:
            needed = dtype.itemsize * math.prod(shape)
            free = backend.free_bytes(self.device)
            if needed > free:
                raise OutOfMemoryError(
                    f"{what} takes {format_bytes(needed)} of host memory and "
                    f"{format_bytes(needed - free)} of that is missing; pass a preallocated "
                    f"tensor instead (out=, or grads= of attention_backward), which may be "
                    f"memory-mapped"
                )
        return torch.empty(shape, dtype=dtype, device=self.device)

    def result(
        self, shape: tuple[int, ...], dtype: torch.dtype, what: str, compute: torch.device
    ) -> torch.Tensor:
        """An uninitialised tensor here for a result that is computed on ``compute``.

        If it can be page-locked it lies in memory that was kept (``PinnedPool``), or begins at a
        page, so that it can be locked head by head (device/page_locks.py); a large one begins at a
        huge page, which the system is asked for.

        Raises:
            OutOfMemoryError: as ``empty``.
        """
        n_bytes = dtype.itemsize * math.prod(shape)
        if n_bytes < WORTH_LOCKING_BYTES or not self.lockable(compute):
            return self.empty(shape, dtype, what)
        kept = backend_of(compute).pinned
        if kept is None:
            return self._fresh(n_bytes, what).view(dtype).view(shape)
        found = kept.take(n_bytes)
        if found is None:
            try:
                found = kept.lend(self._fresh(n_bytes, what))
            except OutOfMemoryError:
                kept.give_back()
                found = kept.lend(self._fresh(n_bytes, what))
        return found.view(dtype).view(shape)

    def _fresh(self, n_bytes: int, what: str) -> torch.Tensor:
        """(n_bytes,) uint8 that begins at a page, of a large one at a huge page."""
        page = PAGE_BYTES if n_bytes < _WORTH_HUGE_PAGES else HUGE_PAGE_BYTES
        room = self.empty((n_bytes + page,), torch.uint8, what)
        at = -room.data_ptr() % page
        found = room[at : at + n_bytes]
        if page == HUGE_PAGE_BYTES:
            ask_for_huge_pages(found)
        return found

    def travelling(
        self, shape: tuple[int, ...], dtype: torch.dtype, compute: torch.device
    ) -> torch.Tensor:
        """An uninitialised tensor here for a state that waits between tasks on ``compute``.

        Where page-locking helps, torch's own allocator locks it and keeps the memory for the next
        call; to lock a new gibibyte takes half a second.

        Raises:
            OutOfMemoryError: as ``empty``.
        """
        if self.lockable(compute):
            try:
                return torch.empty(shape, dtype=dtype, device=self.device, pin_memory=True)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        return self.empty(shape, dtype, "the accumulator")
