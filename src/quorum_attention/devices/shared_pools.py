"""The pools that calls with several ``devices`` share. They are kept until they are
closed."""

from __future__ import annotations

import os
from threading import Lock

from quorum_attention.devices.worker_pool import WorkerPool

_pools: dict[tuple[str, ...], WorkerPool] = {}
_lock = Lock()


def shared_pool(names: tuple[str, ...]) -> WorkerPool:
    """Return the pool of devices that calls share.

    The pool is started if there is none. A worker that was lost is started again.

    Raises:
        ValueError, TypeError, RuntimeError: as ``WorkerPool``.
    """
    with _lock:
        if names not in _pools:
            _pools[names] = WorkerPool(names)
        pool = _pools[names]
    # Without the lock: this waits for a call of another thread, whose progress= may ask
    # for a pool as well.
    pool.restart_lost()
    return pool


def close() -> None:
    """End the workers of calls with several ``devices``. The next such call starts new
    workers.

    Without this call they end with the program. Until then each worker holds a CUDA
    context.
    """
    with _lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()


def _forget() -> None:
    """In a forked process, maybe while another thread has the lock: the pools are the
    parent's."""
    global _lock
    _lock = Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget)
