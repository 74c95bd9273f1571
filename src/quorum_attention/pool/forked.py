"""Workers belong to the process that started them: not to one that is forked off it.

Two processes that talk to one worker read each other's answers. So a forked process closes what it
has of the pipes, and is told so when it uses a pool that it has inherited.
"""

from __future__ import annotations

import multiprocessing.process
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, get_ident
from typing import Any

# Whoever has taken a lock has said so by then.
_MOMENT_SECONDS = 0.2

_pipes: weakref.WeakSet[Any] = weakref.WeakSet()
_processes: weakref.WeakSet[Any] = weakref.WeakSet()


def not_for_forks(process: Any, pipe: Any) -> None:
    """A worker's process and the pipe to it, which forked processes let go of."""
    _processes.add(process)
    _pipes.add(pipe)


def _let_go() -> None:
    """In a process that was forked off."""
    with suppress(Exception):
        for pipe in list(_pipes):
            pipe.close()
        # Python would end them, as its own children, when this process ends.
        for process in list(_processes):
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    _pipes.clear()
    _processes.clear()


def check_process(owner: int) -> None:
    """Refuse to use the workers of another process.

    Args:
        owner: number of the process that started them.

    Raises:
        RuntimeError: this is another one.
    """
    if os.getpid() != owner:
        raise RuntimeError(
            "these workers belong to the process that this one was forked from: open a Pool or a "
            "Farm here, or give the devices by name"
        )


class Turn:
    """A lock for one call at a time, as a ``with`` block.

    An interrupt (Ctrl-C) at whatever moment leaves it taken or free as the block is entered or not.

    Raises:
        RuntimeError: this thread has it already, and would wait for itself; or the process was
            forked from the lock's.
    """

    def __init__(self) -> None:
        self._lock, self._process = Lock(), os.getpid()
        # Who had it last; who has it, a moment after it was taken.
        self._holder: int | None = None

    def __enter__(self) -> None:
        check_process(self._process)
        mine, taken = get_ident(), list[bool]()
        try:
            # Interrupts come between calls into C: ``extend`` takes the lock and notes it in one.
            if self._holder == mine:
                taken.extend(filter(None, map(self._lock.acquire, (True,), (_MOMENT_SECONDS,))))
                if not taken and self._holder == mine:
                    raise RuntimeError(
                        "a call began within another one of the same workers (from its progress=, "
                        "say): it would wait for itself"
                    )
            if not taken:
                taken.extend(map(self._lock.acquire, (True,)))
            self._holder = mine
        except BaseException:
            if taken:
                self._lock.release()
            raise

    @property
    def __exit__(self) -> Callable[..., None]:
        """The lock's own, in C: in Python an interrupt could come before anything is done."""
        return self._lock.__exit__


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)

__all__ = ["Turn", "check_process", "not_for_forks"]
