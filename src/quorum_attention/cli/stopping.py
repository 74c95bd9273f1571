"""Signals that end a process, as exceptions: what is unfinished is cleaned up on the way out."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from quorum_attention.progress.lines import line


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.name = signal.Signals(number).name
        self.status = 128 + number


# The signals that came.
_asked: list[int] = []


def _stop(number: int, frame: FrameType | None) -> None:
    _asked.append(number)
    # One is enough: the second would only interrupt the cleaning up.
    for other in _signals():
        if signal.getsignal(other) is _stop:
            signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)


def _end(number: int, frame: FrameType | None) -> None:
    """An import stays unfinished: torch's ends the process if a handler raises in it."""
    stopped = Stopped(number)
    say_stopped(stopped)
    os._exit(stopped.status)


def say_stopped(stopped: Stopped) -> None:
    """Which signal ended the command, in a line to stderr."""
    line(f"quorum-attention: stopped by {stopped.name}")


def _signals() -> list[int]:
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


@contextmanager
def ending() -> Iterator[None]:
    """In the block, which imports, SIGINT, SIGTERM and SIGHUP end the process at once."""
    with _handled_by(_end):
        yield


@contextmanager
def stoppable() -> Iterator[None]:
    """In the block SIGINT, SIGTERM and SIGHUP raise ``Stopped``."""
    _asked.clear()
    try:
        with _handled_by(_stop):
            yield
    except Exception as error:
        if _asked:  # Python makes other errors of one that comes in the middle of an import
            raise Stopped(_asked[0]) from error
        raise


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Signals in the main thread only.

    Those that are ignored stay so (``nohup`` ignores SIGHUP), as do handlers of somebody else's,
    and nothing is changed outside the main thread.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        usual = (signal.SIG_DFL, signal.default_int_handler)
        for number in _signals():
            if signal.getsignal(number) in usual:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
