"""Progress on stderr: a bar with the time left in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Seconds between two plain lines, and before the first one.
_SECONDS = 2.0
# The share of the work between two of them; after ``_PATIENCE`` seconds there is a line anyway.
_SHARE = 0.1
_PATIENCE = 60.0


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A callable (done, total, label) that shows progress. A bar disappears at the end of the
    ``with`` block; lines stay."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        ids = {}

        def update(done: int, total: int, label: str) -> None:
            if label not in ids:
                ids[label] = bar.add_task(label, total=total)
            bar.update(ids[label], completed=done, total=total)

        yield update


class _Lines:
    """Progress as plain lines, for a file or a pipe."""

    def __init__(self) -> None:
        self._opened = time.monotonic()
        # By label: (time, share of the work done) at its first call, and at its last line.
        self._first: dict[str, tuple[float, float]] = {}
        self._last: dict[str, tuple[float, float]] = {}

    def __call__(self, done: int, total: int, label: str) -> None:
        now, share = time.monotonic(), done / max(1, total)
        began, known = self._first.setdefault(label, (now, share))
        when, told = self._last.setdefault(label, (self._opened, 0.0))
        waited = now - when
        if waited < _SECONDS or (share - told < _SHARE and share < 1 and waited < _PATIENCE):
            return
        self._last[label] = now, share
        left = ""
        if known < share < 1:
            left = f", about {(now - began) * (1 - share) / (share - known):.0f} s left"
        spent = now - self._opened
        _line(f"{label}: {done} of {total} after {spent:.0f} s{left}")


class Status:
    """Shows what is being done, and what has been done."""

    def __init__(self, progress: Progress | None = None, first: str = "") -> None:
        self._progress = progress
        self._shown = None if progress is None else progress.add_task(first, total=None)

    def __call__(self, text: str) -> None:
        """Show ``text``: in place in a terminal, elsewhere on a line of its own."""
        if self._progress is None or self._shown is None:
            _line(text)
        else:
            self._progress.update(self._shown, description=text)

    def done(self, text: str) -> None:
        """Print ``text`` on a line that stays."""
        if self._progress is None:
            _line(text)
        else:
            self._progress.console.print(text, markup=False, highlight=False, emoji=False)


@contextmanager
def status_line(first: str) -> Iterator[Status]:
    """A ``Status`` that shows on stderr what is being done; in a terminal it begins with
    ``first``."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Status()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield Status(progress, first)


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
