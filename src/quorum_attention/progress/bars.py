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


class _Bars:
    """A bar for each label of one call, below those of other calls that run meanwhile."""

    _lock = threading.Lock()
    _users = 0
    _progress: Progress | None = None

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ids: dict[str, TaskID] = {}
        self._open = False

    def update(self, done: int, total: int, label: str) -> None:
        """Draw the bar of ``label``; one that would be full from the start is not drawn."""
        if not self._open:
            if done >= total:
                return
            self._enter()
        assert _Bars._progress is not None
        if label in self._ids:
            _Bars._progress.update(self._ids[label], completed=done, total=total)
        else:
            self._ids[label] = _Bars._progress.add_task(label, completed=done, total=total)

    def _enter(self) -> None:
        from rich import progress as parts

        with _Bars._lock:
            if _Bars._progress is None:
                _Bars._progress = parts.Progress(
                    parts.TextColumn("{task.description}", markup=False), parts.BarColumn(),
                    parts.MofNCompleteColumn(), parts.TimeRemainingColumn(),
                    console=self._console, transient=True, redirect_stdout=_stdout_is_seen(),
                )  # fmt: skip
                _Bars._progress.start()
            _Bars._users += 1
            self._open = True

    def close(self) -> None:
        """Remove the bars; the last call takes the display down."""
        if not self._open:
            return
        self._open = False
        with _Bars._lock:
            progress = _Bars._progress
            assert progress is not None
            for task in self._ids.values():
                progress.remove_task(task)
            _Bars._users -= 1
            if _Bars._users == 0:
                _Bars._progress = None
                progress.stop()


class _Shown:
    """A callable (done, total, label). Nothing is loaded or drawn in the first half second."""

    def __init__(self) -> None:
        self._opened = time.monotonic()
        self._view: _Bars | Lines | None = None

    def __call__(self, done: int, total: int, label: str) -> None:
        """Show that ``done`` of ``total`` are done."""
        if self._view is None:
            if time.monotonic() - self._opened < _PATIENCE:
                return
            console = _console()
            self._view = Lines(self._opened) if console is None else _Bars(console)
        self._view.update(done, total, label)

    def close(self) -> None:
        """Remove bars; lines stay."""
        if self._view is not None:
            self._view.close()


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
