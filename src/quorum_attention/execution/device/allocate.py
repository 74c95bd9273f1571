"""Allocates results and accumulators where they lie: on the device, or in host
memory."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Literal

import torch

from quorum_attention.errors import OutOfMemoryError, is_out_of_memory
from quorum_attention.execution.device.host_memory import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
)
from quorum_attention.execution.device.lookup import HOST, backend_of, on_host
from quorum_attention.execution.device.memory_advice import ask_for_huge_pages
from quorum_attention.execution.device.page_locks import WORTH_LOCKING_BYTES
from quorum_attention.execution.device.pinned_pool import PinnedPool, lock_until_freed
from quorum_attention.kernels.result_layout import empty_like_input
from quorum_attention.units import format_bytes

# Less than this fits few huge pages.
_WORTH_HUGE_PAGES = 8 << 20

Home = Literal["device", "host"]
"""Where accumulators wait between tasks, as schedules name it."""


def home_device(home: Home, compute: torch.device) -> torch.device:
    """Where accumulators are whose home is ``home``, of a pass on ``compute``."""
    return compute if home == "device" else HOST


def empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    purpose: str,
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """An uninitialised tensor on ``device``; messages call it ``purpose``.

    Args:
        like: the input whose order of dimensions the tensor has; None: dimensions in
            order.

    Raises:
        OutOfMemoryError: host memory cannot hold it; says how much is missing.
    """
    backend = backend_of(device)
    if not backend.own_memory:
        needed = dtype.itemsize * math.prod(shape)
        free = backend.free_bytes(device)
        if needed > free:
            raise OutOfMemoryError(
                f"{purpose} takes {format_bytes(needed)} of host memory and "
                f"{format_bytes(needed - free)} of that is missing; pass a "
                "preallocated tensor instead (out=, or grads= of attention_backward), "
                "which may be memory-mapped"
            )
    if like is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return empty_like_input(like, shape, dtype, device)


def empty_result(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    purpose: str,
    compute: torch.device,
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """An uninitialised tensor on ``device`` for a result that is computed on
    ``compute``.

    If it can be page-locked it lies in memory that was kept (``PinnedPool``), or begins
    at a page, so that it can be locked head by head (device/page_locks.py); a large one
    begins at a huge page, which the system is asked for. Its dimensions are in order.

    Args:
        like: as of ``empty``, for a result that is not page-locked.

    Raises:
        OutOfMemoryError: as ``empty``.
    """
    n_bytes = dtype.itemsize * math.prod(shape)
    is_lockable = _is_lockable(device, compute)
    pool = backend_of(compute).pinned
    if not is_lockable:
        return empty(shape, dtype, device, purpose, like)
    if pool is None or n_bytes < WORTH_LOCKING_BYTES:
        return empty(shape, dtype, device, purpose)
    memory = pool.take(n_bytes, lock_later=True)
    if memory is None:
        memory = pool.lend(_fresh_or_given_back(n_bytes, purpose, pool))
    return memory.view(dtype).view(shape)


def _fresh_or_given_back(n_bytes: int, purpose: str, pool: PinnedPool) -> torch.Tensor:
    """``_fresh``; if host memory is short, what ``pool`` keeps is given back first."""
    try:
        return _fresh(n_bytes, purpose)
    except OutOfMemoryError:
        pool.give_back()
    return _fresh(n_bytes, purpose)


def _fresh(n_bytes: int, purpose: str) -> torch.Tensor:
    """(n_bytes,) uint8 of host memory that begins at a page, of a large one at a huge
    page."""
    page = PAGE_BYTES if n_bytes < _WORTH_HUGE_PAGES else HUGE_PAGE_BYTES
    memory = empty(
        (n_bytes + page,),
        torch.uint8,
        HOST,
        purpose,
    )
    first_page = -memory.data_ptr() % page
    memory = memory[first_page : first_page + n_bytes]
    if page == HUGE_PAGE_BYTES:
        ask_for_huge_pages(memory)
    return memory


def empty_accumulator(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    compute: torch.device,
) -> torch.Tensor:
    """An uninitialised tensor on ``device`` for a state that waits between tasks on
    ``compute``.

    Where page-locking helps, torch's own allocator locks it and keeps the memory for
    the next call; to lock a new gibibyte takes half a second.

    Raises:
        OutOfMemoryError: as ``empty``.
    """
    if _is_lockable(device, compute):
        try:
            return torch.empty(
                shape,
                dtype=dtype,
                device=device,
                pin_memory=True,
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
    return empty(shape, dtype, device, "the accumulator")


def page_locked(n_bytes: int, compute: torch.device, owner: str) -> torch.Tensor:
    """Host memory that stays page-locked until it is freed, for copies to and from
    ``compute``.

    If the system refuses to lock it, the memory is ordinary, and a warning says so
    once.

    Args:
        owner: what messages call it.

    Returns:
        (n_bytes,) uint8, which begins at a page.

    Raises:
        OutOfMemoryError: as ``empty``.
    """
    memory = _fresh(n_bytes, owner)
    pool = backend_of(compute).pinned
    if pool is None or n_bytes == 0:
        return memory
    # Memory that was never touched takes five times as long to lock.
    memory.zero_()
    locked = lock_until_freed(memory, pool.locker)
    if locked is not None:
        return locked
    _warn_of_refused_locks()
    return memory


@functools.cache
def _warn_of_refused_locks() -> None:
    """Warn, once in a process, that host memory is ordinary."""
    warnings.warn(
        "the system refused to page-lock host memory: copies from it are several "
        "times slower (a limit on locked memory, such as ulimit -l, may be the cause)",
        stacklevel=2,
    )


def _is_lockable(device: torch.device, compute: torch.device) -> bool:
    """Whether page-locking tensors on ``device`` makes copies to ``compute`` faster."""
    return on_host(device) and device != compute and backend_of(compute).own_memory
