"""The progress of one call, shown as where it runs allows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from quorum_attention.progress.lines import Lines
from quorum_attention.progress.notebook import NotebookBars, in_notebook
from quorum_attention.progress.terminal import TerminalBars, can_redraw

# Seconds before a bar is drawn: bars of many short calls, one after the other, would only flicker.
_PATIENCE = 0.5


class View(Protocol):
    """What shows the progress of one call, under one or several labels."""

    def update(self, done: int, total: int, label: str) -> None:
        """Show that ``done`` of ``total`` are done."""

    def close(self) -> None:
        """Leave nothing behind that would change any more."""


class Shown:
    """A callable (done, total, label). Nothing is loaded or drawn in the first half second."""

    def __init__(self) -> None:
        self._opened = time.monotonic()
        self._view: View | None = None

    def __call__(self, done: int, total: int, label: str) -> None:
        """Show that ``done`` of ``total`` are done."""
        if self._view is None:
            if time.monotonic() - self._opened < _PATIENCE:
                return
            self._view = self._open()
        self._view.update(done, total, label)

    def _open(self) -> View:
        if in_notebook():
            return NotebookBars(self._opened)
        return TerminalBars() if can_redraw() else Lines(self._opened)

    def close(self) -> None:
        """Remove bars; lines stay."""
        if self._view is not None:
            self._view.close()


@contextmanager
def progress_bar() -> Iterator[Shown]:
    """A callable (done, total, label) that shows progress: bars in a terminal and in a notebook,
    lines in files and pipes. Bars disappear at the end of the ``with`` block, however it ends;
    lines stay. Blocks may be nested, and be open in several threads at once: their bars stand one
    below the other."""
    shown = Shown()
    try:
        yield shown
    finally:
        shown.close()
