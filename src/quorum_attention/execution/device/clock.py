"""Clocks that measure the stages of units.

Seconds are measured on the device that spends them, by the paper's six stages: *gather* (state
handed on between slots, and scaling), *h2d* (copies from the host to the device), *compute* (the
inner kernel), *merge*, *d2h* (copies back), and *scatter* (finished rows into their final dtype).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

STAGES = ("gather", "h2d", "compute", "merge", "d2h", "scatter")
# With more pairs of events than this waiting to be read, those that have happened are read.
_MOST_PENDING = 4096


class Clock:
    """Adds up seconds by stage; this one measures nothing."""

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """A context: what runs on the current stream in it counts as ``stage``."""
        return nullcontext()

    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far, after all work is done; ``compute`` is without its merges."""
        return {}


class HostClock(Clock):
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


class CudaClock(HostClock):
    """Measures stages by pairs of CUDA events, which are read after they have happened."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """A context: what runs on the current stream in it counts as ``stage``."""
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        try:
            yield
        finally:
            last.record()
            self._pending.append((stage, first, last))
            while len(self._pending) > _MOST_PENDING and self._pending[0][2].query():
                self._read_oldest()

    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far, after all work is done; ``compute`` is without its merges."""
        while self._pending:
            self._pending[0][2].synchronize()
            self._read_oldest()
        return super().seconds()

    def _read_oldest(self) -> None:
        """Add up the oldest pair of events."""
        stage, first, last = self._pending.popleft()
        self.add(stage, first.elapsed_time(last) * 1e-3)
