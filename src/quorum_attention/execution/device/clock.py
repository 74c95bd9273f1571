"""Clocks that measure the stages of units.

Seconds are measured on the device that spends them, by the paper's six stages: *gather*
(state handed on between slots, and scaling), *h2d* (copies from the host to the
device), *compute* (the inner kernel), *merge*, *d2h* (copies back), and *scatter*
(finished rows into their final dtype).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

STAGES = ("gather", "h2d", "compute", "merge", "d2h", "scatter")
# With more pairs of events than this waiting to be read, those that have happened are
# read.
_MOST_PENDING = 4096


class Clock:
    """Adds up seconds by stage; this one measures nothing."""

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """A context: what runs on the current stream in it counts as ``stage``."""
        return nullcontext()

    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far, after all work is done; ``compute`` is without its
        merges."""
        return {}


class HostClock(Clock):
    """Measures the host's time, for devices whose work is done when a call returns."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, stage: str, seconds: float) -> None:
        """Count ``seconds`` more for ``stage``."""
        before = self._sums.get(stage, 0.0)
        self._sums[stage] = before + seconds

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """A context: the time spent in it counts as ``stage``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - started)

    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far, for all stages; ``compute`` is without its
        merges."""
        seconds = {stage: self._sums.get(stage, 0.0) for stage in STAGES}
        without_merges = seconds["compute"] - seconds["merge"]
        seconds["compute"] = max(0.0, without_merges)
        return seconds


class _TimedStage(NamedTuple):
    """The events before and after what counts as a stage."""

    stage: str
    first: torch.cuda.Event
    last: torch.cuda.Event


class CudaClock(HostClock):
    """Measures stages by pairs of CUDA events, which are read after they have
    happened."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: deque[_TimedStage] = deque()

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
            self._pending.append(_TimedStage(stage, first, last))
            while len(self._pending) > _MOST_PENDING and self._pending[0].last.query():
                self._read_oldest()

    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far, after all work is done; ``compute`` is without its
        merges."""
        while self._pending:
            self._pending[0].last.synchronize()
            self._read_oldest()
        return super().seconds()

    def _read_oldest(self) -> None:
        """Add up the oldest pair of events."""
        oldest = self._pending.popleft()
        milliseconds = oldest.first.elapsed_time(oldest.last)
        self.add(oldest.stage, milliseconds * 1e-3)
