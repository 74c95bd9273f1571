"""Progress as plain lines on stderr, for a file or a pipe, and how long the rest will take."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

# Seconds between two lines, and before the first one.
_SECONDS = 2.0
# The share of the work between two of them; after ``_PATIENCE`` seconds there is a line anyway.
_SHARE = 0.1
_PATIENCE = 60.0


class Lines:
    """Progress as plain lines: seldom, so that a log stays readable."""

    def __init__(self, opened: float) -> None:
        self._opened = opened
        # By label: (time, share of the work done) when it was first heard of, and at its last line.
        self._first: dict[str, tuple[float, float]] = {}
        self._last: dict[str, tuple[float, float]] = {}

    def update(self, done: int, total: int, label: str) -> None:
        """Write a line, if there was none for a while and there is something to say."""
        now, share = time.monotonic(), done / max(1, total)
        began, known = self._first.setdefault(label, (now, share))
        when, told = self._last.setdefault(label, (self._opened, 0.0))
        waited = now - when
        if waited < _SECONDS or (share - told < _SHARE and share < 1 and waited < _PATIENCE):
            return
        self._last[label] = now, share
        text = f"{label}: {done} of {total} after {now - self._opened:.0f} s"
        if known < share < 1:
            text += f", about {(now - began) * (1 - share) / (share - known):.0f} s left"
        line(text)


def line(text: str) -> None:
    """Write ``text`` and the end of the line to stderr at once, so that lines of several threads do
    not mix. Nothing happens where stderr is missing, closed, broken or full."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def environment() -> Mapping[str, str]:
    """That of this process, without sizes of a screen that are none.

    Some shells set COLUMNS=0, with which rich prints nothing.
    """
    of_screen, every = ("COLUMNS", "LINES"), os.environ.items()
    return {n: text for n, text in every if n not in of_screen or text.strip("0").isdecimal()}
