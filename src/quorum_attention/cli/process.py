"""The process of a command: signals that end it, as exceptions, so that what is unfinished is
cleaned up on the way out; standard streams that are there, and able to print any name.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
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


def complete_streams() -> None:
    """Open what is missing of stdin, stdout and stderr on nothing, and have stdout print names that
    its encoding does not know.

    Who starts a command may close its streams. The next file that is opened gets such a number,
    so whatever a library wrote to stderr would be written into a result. And a name that cannot be
    printed is no reason to fail after its file is written.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def nobody_reads() -> None:
    """Whoever read stdout has had enough (``| head``): what is still printed goes nowhere, and work
    and exit status are what they would be."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
