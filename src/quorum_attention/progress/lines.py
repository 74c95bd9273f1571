"""Progress as plain lines, for a file or a pipe, and how long the rest will take."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

# Seconds between two plain lines, and before the first one.
_SECONDS = 2.0
# The share of the work between two of them; after ``_PATIENCE`` seconds there is a line anyway.
_SHARE = 0.1
_PATIENCE = 60.0


class Pace:
    """How long the rest of the work will take, from what was done since the first time asked."""

    def __init__(self) -> None:
        # By label: (time, share of the work done).
        self._first: dict[str, tuple[float, float]] = {}

    def left(self, now: float, share: float, label: str) -> str:
        """As words that follow others; empty while nothing is known, and at the end."""
        began, known = self._first.setdefault(label, (now, share))
        if not known < share < 1:
            return ""
        return f", about {(now - began) * (1 - share) / (share - known):.0f} s left"


class Lines:
    """Progress as plain lines on stderr: seldom, so that a log stays readable."""

    def __init__(self, opened: float) -> None:
        self._opened = opened
        self._pace = Pace()
        # By label: (time, share of the work done) at its last line.
        self._last: dict[str, tuple[float, float]] = {}

    def update(self, done: int, total: int, label: str) -> None:
        """A line, if there was none for a while and there is something to say."""
        now, share = time.monotonic(), done / max(1, total)
        left = self._pace.left(now, share, label)
        when, told = self._last.setdefault(label, (self._opened, 0.0))
        waited = now - when
        if waited < _SECONDS or (share - told < _SHARE and share < 1 and waited < _PATIENCE):
            return
        self._last[label] = now, share
        line(f"{label}: {done} of {total} after {now - self._opened:.0f} s{left}")

    def close(self) -> None:
        """Nothing: lines stay."""


def line(text: str) -> None:
    """Write ``text`` and the end of the line to stderr at once, so that lines of several threads do
    not mix. Where stderr is missing, closed, broken or full, nobody reads it, and work goes on."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
