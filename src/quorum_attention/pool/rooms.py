"""Shared memory of results and of copies, kept for the next call when they are freed.

Its pages are made then, and workers have it mapped and page-locked: to do that anew takes them a
tenth of the time of a long call. Kept are as many bytes as on one device twice
(execution/device/page_locks.py), until calls have had no use for them for a while or pools are
closed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from quorum_attention.execution.device.lookup import on_host
from quorum_attention.execution.device.page_locks import WORTH_LOCKING_BYTES, Kept, Locker
from quorum_attention.pool.shared import made_for, room

_MOST_BYTES = 8 << 30
_MOST_OF_HOST = 1 / 16


def _most_bytes() -> int:
    try:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not Unix
        return 0
    return min(_MOST_BYTES, int(host * _MOST_OF_HOST))


# Workers lock it, each for itself: here there is nothing to lock, and nobody to wait for. No worker
# reads or writes after its pass.
_kept = Kept(Locker(lambda address, n: True, lambda address: None, lambda: None), _most_bytes())


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


def result_for(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, keep: bool
) -> tuple[torch.Tensor, bool]:
    """A result that workers can write to, on ``device``, and whether nobody has touched it.

    Args:
        keep: whether host memory is kept when it is freed.
    """
    if keep and on_host(device):
        return kept_room(shape, dtype)
    return made_for(shape, dtype, device), True


def give_back() -> None:
    """Free what is kept and not in use."""
    _kept.give_back()


__all__ = ["give_back", "kept_room", "result_for"]
