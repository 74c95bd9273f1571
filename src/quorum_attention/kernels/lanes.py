"""Several operator calls of a task in flight at once, their merges still one after the other.

An attention kernel works in waves of as many tiles as there are multiprocessors; its last wave
leaves part of the device idle until its slowest tile is done. A second call on another stream
fills that gap (docs/kernels.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Lanes:
    """Streams of one device that take turns; made once for a pass."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]
        self._merged = [torch.cuda.Event() for _ in range(count)]
        self._last: torch.cuda.Event | None = None

    @contextmanager
    def task(self) -> Iterator[None]:
        """Brackets a task: its calls follow the current stream, which follows them afterwards."""
        main = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(main)
        self._last = None
        try:
            yield
        finally:
            for stream in self._streams:
                main.wait_stream(stream)

    @contextmanager
    def call(self, number: int) -> Iterator[None]:
        """Puts the ``number``-th call of a task on its stream."""
        with torch.cuda.stream(self._streams[number % len(self._streams)]):
            yield

    @contextmanager
    def merge(self, number: int) -> Iterator[None]:
        """Within a call: what is merged here follows what was merged before."""
        stream = self._streams[number % len(self._streams)]
        if self._last is not None:
            stream.wait_event(self._last)
        yield
        self._last = self._merged[number % len(self._streams)]
        self._last.record(stream)
