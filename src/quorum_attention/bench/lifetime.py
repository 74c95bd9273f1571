"""Processes that end with the one they work for, also where that is killed outright."""

from __future__ import annotations

import ctypes
import os
import signal

_SET_PARENT_DEATH_SIGNAL = 1


def die_with_parent(parent: int) -> None:
    """Have this process killed when ``parent`` ends.

    Args:
        parent: number of the process that started this one. A thread that ends has
            started it, for the system, and not its process: it has to be one that
            stays.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != parent:  # it had ended before the call above
        os._exit(1)
