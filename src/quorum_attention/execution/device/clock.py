"""Where the time goes: seconds by stage, measured on the device that spends them.

The paper's six stages: *gather* (state handed on between slots, scaling),
*h2d*, *compute* (the inner kernel), *merge*, *d2h*, *scatter* (finished rows into their final
dtype).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

STAGES = ("gather", "h2d", "compute", "merge", "d2h", "scatter")


class Clock(Protocol):
    """Adds up seconds by stage."""

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """Counts what the block enqueues on the current stream."""
        ...

    def seconds(self) -> dict[str, float]:
        """The sums so far, all work finished. ``compute`` is without the merges inside it."""
        ...


class NoClock:
    """Nobody asked."""

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """Nothing to count."""
        return nullcontext()

    def seconds(self) -> dict[str, float]:
        """Nothing was counted."""
        return {}


class HostClock:
    """For work that is done when its call returns."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, stage: str, seconds: float) -> None:
        """Count ``seconds`` more."""
        self._sums[stage] = self._sums.get(stage, 0.0) + seconds

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Counts the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - started)

    def seconds(self) -> dict[str, float]:
        """The sums so far, of every stage."""
        net = {stage: self._sums.get(stage, 0.0) for stage in STAGES}
        net["compute"] = max(0.0, net["compute"] - net["merge"])
        return net
