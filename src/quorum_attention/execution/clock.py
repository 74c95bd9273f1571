"""Where the time goes: seconds by stage, measured on the device that spends them.

The paper's six stages: *gather* (state handed on between slots, scaling),
*h2d*, *compute* (the inner kernel), *merge*, *d2h*, *scatter* (finished rows into their final
dtype). On CUDA by pairs of events on the stream that does the work, so nothing waits for the clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

STAGES = ("gather", "h2d", "compute", "merge", "d2h", "scatter")

# Pairs of events that may wait to be read; beyond it those that have happened are.
_MOST_PENDING = 4096


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


def _net(sums: dict[str, float]) -> dict[str, float]:
    merged = sums.get("merge", 0.0)
    net = {stage: sums.get(stage, 0.0) for stage in STAGES}
    net["compute"] = max(0.0, net["compute"] - merged)
    return net


class HostClock:
    """For work that is done when its call returns."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Counts the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            passed = time.perf_counter() - started
            self._sums[stage] = self._sums.get(stage, 0.0) + passed

    def seconds(self) -> dict[str, float]:
        """The sums so far."""
        return _net(self._sums)


class CudaClock:
    """Pairs of CUDA events, read once they have happened."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Counts what the block enqueues on the current stream."""
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        try:
            yield
        finally:
            last.record()
            self._pending.append((stage, first, last))
            while len(self._pending) > _MOST_PENDING and self._pending[0][2].query():
                self._read()

    def seconds(self) -> dict[str, float]:
        """The sums so far, all work finished."""
        while self._pending:
            self._pending[0][2].synchronize()
            self._read()
        return _net(self._sums)

    def _read(self) -> None:
        stage, first, last = self._pending.popleft()
        self._sums[stage] = self._sums.get(stage, 0.0) + first.elapsed_time(last) * 1e-3
