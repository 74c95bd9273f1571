"""Signals that end a process, as exceptions: what is unfinished is cleaned up on the way out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.name = signal.Signals(number).name
        self.status = 128 + number


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The signals that came.
_asked: list[int] = []


def _stop(number: int, frame: FrameType | None) -> None:
    _asked.append(number)
    # One is enough: the second would only interrupt the cleaning up.
    for other in _SIGNALS:
        if signal.getsignal(other) is _stop:
            signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)


@contextmanager
def stoppable(handler: Any = _stop) -> Iterator[None]:
    """In the block SIGINT, SIGTERM and SIGHUP raise ``Stopped``.

    With ``signal.SIG_DFL`` they end the process at once: for imports, because torch's aborts the
    process if a handler raises in it. Those that are ignored stay so (``nohup`` ignores SIGHUP), as
    do handlers of somebody else's, and nothing is changed outside the main thread.
    """
    before = {}
    _asked.clear()
    if threading.current_thread() is threading.main_thread():
        usual = (signal.SIG_DFL, signal.default_int_handler)
        for number in _SIGNALS:
            if signal.getsignal(number) in usual:
                before[number] = signal.signal(number, handler)
    try:
        yield
    except Exception as error:
        if _asked:  # Python makes other errors of one that comes in the middle of an import
            raise Stopped(_asked[0]) from error
        raise
    finally:
        for number, former in before.items():
            signal.signal(number, former)
