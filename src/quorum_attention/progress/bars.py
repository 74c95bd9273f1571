"""Bars by rich: one display for the whole process, because two would draw over each other."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from quorum_attention.progress.lines import Lines, environment, line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress, TaskID
    from rich.spinner import Spinner

# Seconds before a bar is drawn: bars of many short calls, one after the other, would only flicker.
_PATIENCE = 0.5


class _Lenient:
    """A stream that may be gone: work goes on, and what is written then is lost."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _console() -> Console | None:
    """A console on stderr that can go back to a line; None if there is none.

    What asks for colours in a pipe (FORCE_COLOR) does not make it one. In a notebook rich needs
    ipywidgets.
    """
    from rich.console import Console

    stderr: Any = _Lenient(sys.stderr)
    with suppress(AttributeError, ValueError):  # not a whole file, or closed
        console = Console(file=stderr, _environ=environment())
        if console.is_jupyter:
            return console if importlib.util.find_spec("ipywidgets") else None
        if sys.stderr.isatty() and console.is_interactive:
            return console
    return None


class _Shown:
    """A callable (done, total, label): a bar for each label, below those of other calls.

    Nothing is loaded or drawn in the first half second.
    """

    _lock = threading.Lock()
    _users = 0
    _display: Progress | None = None

    def __init__(self) -> None:
        self._opened = time.monotonic()
        self._lines: Lines | None = None
        self._bars: dict[str, TaskID] = {}

    def __call__(self, done: int, total: int, label: str) -> None:
        """Show that ``done`` of ``total`` are done."""
        if self._lines is not None:
            self._lines.update(done, total, label)
        elif label in self._bars:
            assert _Shown._display is not None
            _Shown._display.update(self._bars[label], completed=done, total=total)
        elif time.monotonic() - self._opened >= _PATIENCE:
            self._begin(done, total, label)

    def _begin(self, done: int, total: int, label: str) -> None:
        """A first line, or a bar; one that would be full from the start is not drawn."""
        console = _console()
        if console is None:
            self._lines = Lines(self._opened)
            self._lines.update(done, total, label)
        elif self._bars or done < total:
            with _Shown._lock:
                display = _Shown._display or _started(console)
                _Shown._display = display
                _Shown._users += not self._bars
                self._bars[label] = display.add_task(label, completed=done, total=total)

    def close(self) -> None:
        """Remove the bars, and with the last call's the display; lines stay."""
        if not self._bars:
            return
        with _Shown._lock:
            display = _Shown._display
            assert display is not None
            for bar in self._bars.values():
                display.remove_task(bar)
            _Shown._users -= 1
            if _Shown._users == 0:
                _Shown._display = None
                display.stop()


def _started(console: Console) -> Progress:
    from rich import progress as parts

    found = parts.Progress(
        parts.TextColumn("{task.description}", markup=False), parts.BarColumn(),
        parts.MofNCompleteColumn(), parts.TimeRemainingColumn(), console=console, transient=True,
        redirect_stdout=_stdout_is_seen(),
    )  # fmt: skip
    found.start()
    return found


@contextmanager
def progress_bar() -> Iterator[_Shown]:
    """A callable (done, total, label) that shows progress: bars in a terminal and in a notebook,
    lines in files and pipes. Bars disappear at the end of the ``with`` block, however it ends;
    lines stay. Blocks may be nested, and be open in several threads at once: their bars stand one
    below the other."""
    shown = _Shown()
    try:
        yield shown
    finally:
        shown.close()


class Status:
    """What a command does at present: in place in a terminal, elsewhere on a line of its own."""

    def __init__(self, live: Live | None = None) -> None:
        self._live = live

    def __call__(self, text: str) -> None:
        """Show ``text``."""
        if self._live is None:
            line(text)
        else:
            self._live.update(_spinner(text))

    def done(self, text: str) -> None:
        """Print ``text`` on a line that stays."""
        if self._live is None:
            line(text)
        else:
            self._live.console.print(text, markup=False, highlight=False, emoji=False)


@contextmanager
def status_line(first: str) -> Iterator[Status]:
    """A ``Status`` on stderr; in a terminal it begins with ``first``."""
    console = _console()
    if console is None:
        yield Status()
        return
    from rich.live import Live

    same = _stdout_is_seen()
    with Live(_spinner(first), console=console, transient=True, redirect_stdout=same) as live:
        yield Status(live)


def _spinner(text: str) -> Spinner:
    from rich.spinner import Spinner
    from rich.text import Text

    return Spinner("dots", Text(text))


def _stdout_is_seen() -> bool:
    """Whether what is printed meanwhile may go through the display, which writes to stderr."""
    return sys.stdout is not None and sys.stdout.isatty()
