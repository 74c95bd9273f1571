"""The pools that calls with several ``devices`` share: started once, ended with the program."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from threading import Lock
from typing import Any

from quorum_attention.call.options import Budget
from quorum_attention.call.request import Request, Tensors, request_of
from quorum_attention.pool.names import names_of
from quorum_attention.pool.pool import Pool
from quorum_attention.pool.request import request_on_several

# A process that was forked off has the pools of its parent, and may not use them.
_pools: dict[tuple[int, tuple[str, ...]], Pool] = {}
_lock = Lock()


def _forked() -> None:
    """In a process that was forked off, maybe while another thread had the lock."""
    global _lock
    _lock = Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def kept_pool(devices: Sequence[str]) -> Pool:
    """The pool of these devices that calls share. It is started where there is none, or where no
    worker of it is left; a worker that was lost is started again.

    Raises:
        ValueError, TypeError, RuntimeError: as ``Pool``.
    """
    names = tuple(devices)
    name = (os.getpid(), names)
    while True:
        with _lock:
            pool = _pools.get(name)
            if pool is None:
                if not _pools:
                    atexit.register(close)
                pool = _pools[name] = Pool(names)
                return pool
        # Without the lock: this waits for a call of another thread, whose progress= may ask for a
        # pool as well.
        pool.mend()
        with _lock:
            if _pools.get(name) is pool:
                return pool
        pool.close()  # closed meanwhile, and perhaps mended after that


def request_on_devices(function: str, *call: Any) -> tuple[Tensors, Request]:
    """``request_of``, where ``devices`` may be several or a pool.

    Raises:
        Errors as of ``request_of`` and ``request_on_several``.
    """
    written = call[-1]
    if isinstance(written.devices, Pool):
        pool = written.devices
        return request_on_several(function, *call, count=len(pool.workers), pool_of=lambda: pool)
    names = names_of(written.devices)
    if len(names) == 1:
        one = written._replace(devices=names[0], budget=_of_one(written.budget))
        every: tuple[Any, ...] = (*call[:-1], one)
        return request_of(function, *every)
    return request_on_several(function, *call, count=len(names), pool_of=lambda: kept_pool(names))


def _of_one(budget: Budget | None) -> Budget | None:
    return budget[0] if isinstance(budget, (list, tuple)) and len(budget) == 1 else budget


def close() -> None:
    """End the workers of calls with several ``devices``; the next such call starts others.

    They end with the program in any case. Until then each holds a CUDA context.
    """
    with _lock:
        for (process, _), pool in _pools.items():
            if process == os.getpid():
                pool.close()
        _pools.clear()


__all__ = ["close", "kept_pool", "request_on_devices"]
