"""Where the time goes: seconds by stage, measured on the device that spends them.

The stages are the paper's six: *gather* (state handed on between slots, and scaling), *h2d* (copies
from the host to the device), *compute* (the inner kernel), *merge*, *d2h* (copies back), and
*scatter* (finished rows into their final dtype).
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
        """A context: what runs on the current stream in it counts as ``stage``."""
        ...

    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far, after all work is done; ``compute`` is without its merges."""
        ...


class NoClock:
    """A clock that measures nothing."""

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return nullcontext()

    def seconds(self) -> dict[str, float]:
        """No seconds for any stage."""
        return {}


class HostClock:
    """Measures the host's time, for devices whose work is done when a call returns."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, stage: str, seconds: float) -> None:
        """Count ``seconds`` more for ``stage``."""
        self._sums[stage] = self._sums.get(stage, 0.0) + seconds

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """A context: the time spent in it counts as ``stage``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - started)

    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far, for all stages; ``compute`` is without its merges."""
        net = {stage: self._sums.get(stage, 0.0) for stage in STAGES}
        net["compute"] = max(0.0, net["compute"] - net["merge"])
        return net
