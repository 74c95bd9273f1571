"""Bars by rich: one display for the whole process, because two would draw over each
other."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from quorum_attention.progress.lines import Lines

# Seconds before a bar is drawn: bars of many short calls, one after the other, would
# only flicker.
_PATIENCE = 0.5
# Seconds between two drawings, so that the terminal does not hold up quick work.
_REDRAW_SECONDS = 0.1


def _console() -> Any:
    """A console on stderr that can go back to a line; None if there is none.

    What asks for colours in a pipe (FORCE_COLOR) does not make it one. In a notebook
    rich needs ipywidgets.
    """
    from rich.console import Console

    with suppress(AttributeError, ValueError):  # there is no stderr, or it is closed
        console = Console(stderr=True)
        if console.is_jupyter:
            return console if importlib.util.find_spec("ipywidgets") else None
        return console if sys.stderr.isatty() and console.is_interactive else None
    return None


def load_bars() -> None:
    """Import what draws bars, for callers that limit memory afterwards."""
    if _console() is not None:
        import rich.progress  # noqa: F401


class _Display:
    """rich's display of the bars of all open calls.

    The display has no thread of its own: a thread takes memory, and the system may
    grant none. The threads that tell what is done draw the bars.
    """

    def __init__(self) -> None:
        from rich import progress as rich

        # The display writes to stderr: what is printed to a file meanwhile must not go
        # there.
        stdout_is_seen = sys.stdout is not None and sys.stdout.isatty()
        self._bars = rich.Progress(
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TimeRemainingColumn(),
            console=_console(),
            transient=True,
            auto_refresh=False,
            redirect_stdout=stdout_is_seen,
        )
        self._drawn_at = time.monotonic()
        try:
            self._bars.start()
        except BaseException:
            self.stop()
            raise

    def add(self, label: str, done: int, total: int) -> Any:
        """Draw one more bar, and return its number."""
        return self._bars.add_task(label, completed=done, total=total)

    def update(self, bar: Any, done: int, total: int) -> None:
        """Note how far a bar is, and draw all bars if they were not drawn a moment
        ago."""
        now = time.monotonic()
        is_due = now - self._drawn_at >= _REDRAW_SECONDS
        if is_due:
            self._drawn_at = now
        self._bars.update(bar, completed=done, total=total, refresh=is_due)

    def remove(self, bars: Iterable[Any]) -> None:
        """Remove some bars."""
        for bar in bars:
            self._bars.remove_task(bar)

    def is_empty(self) -> bool:
        """Whether no bar is left."""
        return not self._bars.tasks

    def stop(self) -> None:
        """Erase all bars, and show the cursor again, as far as the terminal can be
        written to."""
        try:
            self._bars.stop()
        except Exception:
            with suppress(Exception):
                self._bars.console.show_cursor(True)


class _Shown:
    """A callable (done, total, label): a bar for each label, below those of other
    calls.

    Nothing is loaded or drawn in the first half second. Drawing never ends work: where
    it fails, because the terminal is gone or memory has run out, lines follow.
    """

    _lock = threading.Lock()
    _shared: _Display | None = None

    def __init__(self) -> None:
        self._opened = time.monotonic()
        self._lines: Lines | None = None
        self._display: _Display | None = None
        self._bars: dict[str, Any] = {}

    def __call__(self, done: int, total: int, label: str) -> None:
        """Show that ``done`` of ``total`` are done."""
        is_new = self._lines is None and self._display is None
        if is_new and time.monotonic() - self._opened < _PATIENCE:
            return
        if self._lines is None and not self._drawn(done, total, label):
            self._lines = Lines(self._opened)
        if self._lines is not None:
            self._lines.update(done, total, label)

    def _drawn(self, done: int, total: int, label: str) -> bool:
        """Draw the bar of ``label``. False if this is no place for bars, or no longer
        one."""
        try:
            if self._display is None and _console() is None:
                return False
            with _Shown._lock:
                return self._draw(done, total, label)
        except Exception:
            # The work goes on, whatever a broken terminal or a full memory raises.
            self._give_up()
            return False

    def _draw(self, done: int, total: int, label: str) -> bool:
        """Draw the bar of ``label``. False if another call gave the display up."""
        if self._display is not None and self._display is not _Shown._shared:
            return False
        if self._display is not None and label in self._bars:
            self._display.update(self._bars[label], done, total)
        elif (
            self._bars or done < total
        ):  # a bar that would be full from the start is not drawn
            self._display = _Shown._shared = _Shown._shared or _Display()
            self._bars[label] = self._display.add(label, done, total)
        return True

    def _give_up(self) -> None:
        """Stop the display that all calls share: it cannot be drawn to."""
        with _Shown._lock:
            if _Shown._shared is not None:
                _Shown._shared.stop()
                _Shown._shared = None

    def close(self) -> None:
        """Remove the bars, and with the last call's the display; lines stay."""
        with _Shown._lock:
            display = self._display
            if display is None or display is not _Shown._shared:
                return
            display.remove(self._bars.values())
            if display.is_empty():
                display.stop()
                _Shown._shared = None


@contextmanager
def progress_bar() -> Iterator[_Shown]:
    """A callable (done, total, label) that shows progress: bars in a terminal and in a
    notebook, lines in files and pipes. Bars disappear at the end of the ``with`` block,
    however it ends; lines stay. Blocks may be nested, and be open in several threads at
    once: their bars stand one below the other."""
    shown = _Shown()
    try:
        yield shown
    finally:
        shown.close()
