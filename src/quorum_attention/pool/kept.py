"""The pools that calls with several ``devices`` share: started once, ended with the program."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from threading import Lock

import torch

from quorum_attention.pool.names import names_of
from quorum_attention.pool.pool import Pool

# A process that was forked off has the pools of its parent, and may not use them.
_pools: dict[tuple[int, tuple[str, ...]], Pool] = {}
_lock = Lock()


def kept_pool(devices: str | Sequence[str | torch.device]) -> Pool:
    """The pool of these devices that calls share. It is started where there is none, or where no
    worker of it is left; a worker that was lost is started again.

    Raises:
        ValueError, TypeError, RuntimeError: as ``Pool``.
    """
    names = tuple(names_of(devices))
    with _lock:
        pool = _pools.get((os.getpid(), names))
        if pool is None:
            if not _pools:
                atexit.register(close)
            pool = _pools[os.getpid(), names] = Pool(names)
        else:
            pool.mend()
        return pool


def close() -> None:
    """End the workers of calls with several ``devices``; the next such call starts others.

    They end with the program in any case. Until then each holds a CUDA context.
    """
    with _lock:
        for (process, _), pool in _pools.items():
            if process == os.getpid():
                pool.close()
        _pools.clear()


__all__ = ["close", "kept_pool"]
