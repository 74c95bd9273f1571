"""Bars in a terminal: one display for the whole process, because two would draw over each other."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID


# Sizes that rich takes for granted; with a width of 0 it prints nothing.
_SIZES = ("COLUMNS", "LINES")
_SIZE = re.compile("0*[1-9][0-9]{0,5}")


def environment() -> Mapping[str, str]:
    """That of this process, without sizes of a screen that are none: some shells set COLUMNS=0."""
    every = os.environ.items()
    return {n: text for n, text in every if n not in _SIZES or _SIZE.fullmatch(text)}


class _Lenient:
    """A stream that may be gone: what is written then is read by nobody, and work goes on."""

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


def can_redraw() -> bool:
    """Whether stderr is a terminal that can go back to a line.

    What asks for colours in a pipe (FORCE_COLOR) does not make it one.
    """
    try:
        if sys.stderr is None or not sys.stderr.isatty():
            return False
    except (AttributeError, ValueError):  # not a whole file, or closed
        return False
    return bool(_console().is_interactive)


def live(*columns: ProgressColumn) -> Progress:
    """A display on stderr that is not started yet, and disappears when it is stopped."""
    from rich.progress import Progress

    # Rich would send what is printed meanwhile to the display's own file: what goes from stdout
    # to a file or a pipe has to get there.
    same = sys.stdout is not None and sys.stdout.isatty()
    return Progress(*columns, console=_console(), transient=True, redirect_stdout=same)


def _console() -> Console:
    from rich.console import Console

    stderr: Any = _Lenient(sys.stderr)
    return Console(file=stderr, _environ=environment())


class _Display:
    """The process's display: there while anybody shows a bar."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._progress: Progress | None = None

    def enter(self) -> Progress:
        """One user more."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        with self._lock:
            if self._progress is None:
                progress = live(
                    TextColumn("{task.description}", markup=False),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TimeRemainingColumn(),
                )
                progress.start()
                self._progress = progress
            self._users += 1
            return self._progress

    def leave(self) -> None:
        """One user less; the last one takes the display down."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._progress is not None:
                progress, self._progress = self._progress, None
                progress.stop()


_DISPLAY = _Display()


class TerminalBars:
    """A bar for each label, below those of other calls."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._ids: dict[str, TaskID] = {}

    def update(self, done: int, total: int, label: str) -> None:
        """Draw the bar of ``label``; one that would be full from the start is not drawn."""
        if self._progress is None:
            if done >= total:
                return
            self._progress = _DISPLAY.enter()
        if label in self._ids:
            self._progress.update(self._ids[label], completed=done, total=total)
        else:
            self._ids[label] = self._progress.add_task(label, completed=done, total=total)

    def close(self) -> None:
        """Remove the bars."""
        if self._progress is None:
            return
        progress, self._progress = self._progress, None
        for task in self._ids.values():
            progress.remove_task(task)
        self._ids.clear()
        _DISPLAY.leave()
