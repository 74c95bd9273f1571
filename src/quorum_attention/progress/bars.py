"""Bars by rich: one display for the whole process, because two would draw over each other."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from quorum_attention.progress.lines import Lines

# Seconds before a bar is drawn: bars of many short calls, one after the other, would only flicker.
_PATIENCE = 0.5


def _console() -> Any:
    """A console on stderr that can go back to a line; None if there is none.

    What asks for colours in a pipe (FORCE_COLOR) does not make it one. In a notebook rich needs
    ipywidgets.
    """
    from rich.console import Console

    with suppress(AttributeError, ValueError):  # there is no stderr, or it is closed
        console = Console(stderr=True)
        if console.is_jupyter:
            return console if importlib.util.find_spec("ipywidgets") else None
        return console if sys.stderr.isatty() and console.is_interactive else None
    return None


class _Shown:
    """A callable (done, total, label): a bar for each label, below those of other calls.

    Nothing is loaded or drawn in the first half second. Where a terminal is gone, work goes on.
    """

    _lock = threading.Lock()
    _display: Any = None

    def __init__(self) -> None:
        self._opened = time.monotonic()
        self._lines: Lines | None = None
        self._bars: dict[str, Any] = {}

    def __call__(self, done: int, total: int, label: str) -> None:
        """Show that ``done`` of ``total`` are done."""
        if self._lines is None and not self._bars:
            if time.monotonic() - self._opened < _PATIENCE:
                return
            self._lines = Lines(self._opened) if _console() is None else None
        if self._lines is not None:
            self._lines.update(done, total, label)
        elif label in self._bars:
            _Shown._display.update(self._bars[label], completed=done, total=total)
        elif self._bars or done < total:  # a bar that would be full from the start is not drawn
            with _Shown._lock, suppress(OSError):
                display = _Shown._display = _Shown._display or _started()
                self._bars[label] = display.add_task(label, completed=done, total=total)

    def close(self) -> None:
        """Remove the bars, and with the last call's the display; lines stay."""
        if self._bars:
            with _Shown._lock, suppress(OSError):
                display = _Shown._display
                for bar in self._bars.values():
                    display.remove_task(bar)
                if not display.tasks:
                    _Shown._display = None
                    display.stop()


def _started() -> Any:
    from rich import progress as parts

    # The display writes to stderr: what is printed to a file meanwhile must not go there.
    seen = sys.stdout is not None and sys.stdout.isatty()
    found = parts.Progress(
        parts.TextColumn("{task.description}", markup=False), parts.BarColumn(),
        parts.MofNCompleteColumn(), parts.TimeRemainingColumn(), console=_console(), transient=True,
        redirect_stdout=seen,
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
