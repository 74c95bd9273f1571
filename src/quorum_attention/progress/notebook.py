"""Bars in a notebook: HTML that is replaced in place. It needs IPython, which is there, and no
widgets, which may not be."""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Any

from quorum_attention.progress.lines import Pace

# Seconds between two drawings.
_SECONDS = 0.1


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process (IPython in a terminal is none)."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookBars:
    """A bar for each label in the output of a cell."""

    def __init__(self, opened: float) -> None:
        self._opened = opened
        self._pace = Pace()
        self._rows: dict[str, tuple[int, int, str]] = {}
        self._drawn = -_SECONDS
        self._handle: Any = None

    def update(self, done: int, total: int, label: str) -> None:
        """Draw the bars, if the last time is long enough ago; a first one that would be full from
        the start is not drawn."""
        now = time.monotonic()
        self._rows[label] = done, total, self._pace.left(now, done / max(1, total), label)
        if now - self._drawn < _SECONDS or (self._handle is None and done >= total):
            return
        self._drawn = now
        data = {"text/html": self._html(), "text/plain": self._text()}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        """Remove the bars: the output of the cell stays, empty."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.update({"text/html": "", "text/plain": ""}, raw=True)

    def _html(self) -> str:
        return "".join(
            f'<div><progress value="{done}" max="{max(1, total)}"></progress> '
            f"{escape(label)}: {done:,} of {total:,}{left}</div>"
            for label, (done, total, left) in self._rows.items()
        )

    def _text(self) -> str:
        return "\n".join(
            f"{label}: {done} of {total}{left}" for label, (done, total, left) in self._rows.items()
        )
