"""Helper threads. They make work faster or show how far it is; work goes on without
them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Python raises these where the system grants no thread: a limit on processes, or on
# memory that has no room for one more stack (8 MiB, usually).
NO_THREAD = (RuntimeError, MemoryError)
# A handler of a signal may raise an Exception too, as one of SIGALRM raises
# TimeoutError. No type tells it from an error of the action itself, but no handler is
# called so often during one action.
_MOST_ERRORS = 100


def try_start(thread: threading.Thread) -> bool:
    """Start ``thread``. False if the system grants no thread."""
    try:
        thread.start()
    except NO_THREAD:
        return False
    return True


def in_spite_of_interrupts(action: Callable[[], object]) -> None:
    """Run ``action`` again until it is not interrupted: the caller may free memory
    next, which others still read. What interrupted it is raised only after that.

    Args:
        action: can be run again after any of its steps.

    Raises:
        BaseException: the last interrupt (KeyboardInterrupt, or what a handler of a
            signal raised); or an error of ``action``, which failed ``_MOST_ERRORS``
            times and has not been done.
    """
    interrupt: BaseException | None = None
    n_errors = 0
    while n_errors < _MOST_ERRORS:
        try:
            action()
            break
        except Exception as error:
            interrupt = error
            n_errors += 1
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def start_executors(count: int, name: str) -> list[ThreadPoolExecutor]:
    """Executors of one running thread each: ``count`` of them, or as many as the system
    grants.

    An executor that starts its thread when work is submitted would raise then, and
    still keep the work: a thread that starts later would do it.
    """
    executors: list[ThreadPoolExecutor] = []
    for _ in range(count):
        executor = ThreadPoolExecutor(1, name)
        try:
            executor.submit(int)
        except NO_THREAD:
            break
        executors.append(executor)
    return executors
