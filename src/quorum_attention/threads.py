"""Helper threads. They make work faster or show how far it is; work goes on without
them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Python raises these where the system grants no thread: a limit on processes, or on
# memory that has no room for one more stack (8 MiB, usually).
NO_THREAD = (RuntimeError, MemoryError)


def try_start(thread: threading.Thread) -> bool:
    """Start ``thread``. False if the system grants no thread."""
    try:
        thread.start()
    except NO_THREAD:
        return False
    return True


def in_spite_of_interrupts(action: Callable[[], object]) -> None:
    """Run ``action`` until it ends by itself: the caller may free memory next, which
    others still read. An interrupt (Ctrl-C) is raised only after that."""
    interrupt: BaseException | None = None
    while True:
        try:
            action()
            break
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
