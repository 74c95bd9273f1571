"""The process of a command: signals that end it, as exceptions, so that what is
unfinished is cleaned up on the way out; standard streams that are there, and able to
print any name.
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
# The signals that asked the process to end.
_received: list[int] = []


def _stop(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    # A second signal would only interrupt the cleaning up.
    for later_number in _SIGNALS:
        if signal.getsignal(later_number) is _stop:
            signal.signal(later_number, signal.SIG_IGN)
    raise Stopped(number)


@contextmanager
def stoppable(handler: Any = _stop) -> Iterator[None]:
    """In the block SIGINT, SIGTERM and SIGHUP raise ``Stopped``.

    With ``signal.SIG_DFL`` they end the process at once: for imports, because torch's
    aborts the process if a handler raises in it. Those that are ignored stay so
    (``nohup`` ignores SIGHUP), as do handlers of somebody else's, and nothing is
    changed outside the main thread.
    """
    before = {}
    _received.clear()
    if threading.current_thread() is threading.main_thread():
        usual = (signal.SIG_DFL, signal.default_int_handler)
        for number in _SIGNALS:
            if signal.getsignal(number) in usual:
                before[number] = signal.signal(number, handler)
    try:
        yield
    except Exception as error:
        if _received:  # an import turns an error that a signal raises in it into others
            raise Stopped(_received[0]) from error
        raise
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def complete_streams() -> None:
    """Open closed standard streams on the null device, and let stdout escape characters
    that its encoding lacks.

    A command can be started with its streams closed. The next file that it opened would
    get the number of stderr, and warnings of a library would be written into a result.
    A name that cannot be printed must not fail a command after its file is written.
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


def ignore_broken_pipe() -> None:
    """Send what is still printed to the null device, when the reader of stdout has
    ended, as ``| head`` does. The command goes on, and its exit status stays the same.
    """
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
