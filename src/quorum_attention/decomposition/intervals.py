"""Half-open intervals of whole numbers."""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """Positions [start, stop)."""

    start: int
    stop: int
