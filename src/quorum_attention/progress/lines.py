"""Progress as plain lines on stderr, for a file or a pipe, and how long the rest will
take."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

# Seconds between two lines, and before the first one.
_SECONDS = 2.0
# The share of the work between two of them; after ``_PATIENCE`` seconds there is a line
# anyway.
_SHARE = 0.1
_PATIENCE = 60.0


class Lines:
    """Progress as plain lines: seldom, so that a log stays readable."""

    def __init__(self, opened: float) -> None:
        self._opened = opened
        # By label: (time, share of the work done) at its last line.
        self._last: dict[str, tuple[float, float]] = {}

    def update(self, done: int, total: int, label: str) -> None:
        """Write a line, if the last one is old and enough was done since, or it is very
        old."""
        now = time.monotonic()
        share = done / max(1, total)
        last_time, last_share = self._last.get(label, (self._opened, 0.0))
        waited = now - last_time
        gained = share - last_share
        if waited < _SECONDS:
            return
        if gained < _SHARE and share < 1 and waited < _PATIENCE:
            return
        text = f"{label}: {done} of {total} after {now - self._opened:.0f} s"
        if label in self._last and gained > 0 and share < 1:
            seconds_left = waited * (1 - share) / gained
            text += f", about {seconds_left:.0f} s left"
        self._last[label] = (now, share)
        line(text)


def line(text: str) -> None:
    """Write ``text`` and the end of the line to stderr at once, so that lines of
    several threads do not mix. Nothing happens where stderr is missing, closed, broken
    or full."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
