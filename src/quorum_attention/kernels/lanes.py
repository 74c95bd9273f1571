"""Runs several operator calls of a task at once; their merges still follow each other.

An attention kernel works in waves, each with as many tiles as there are multiprocessors. In the
last wave part of the device is idle until the slowest tile is done. A second call on another
stream uses that time (docs/kernels.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Lanes:
    """Streams of one device, used in turn; created once for a pass."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]
        self._merged = [torch.cuda.Event() for _ in range(count)]
        self._last: torch.cuda.Event | None = None

    @contextmanager
    def task(self) -> Iterator[None]:
        """Around a task: its calls wait for the current stream, which then waits for them."""
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
        """Around the ``number``-th call of a task: runs it on its stream."""
        with torch.cuda.stream(self._streams[number % len(self._streams)]):
            yield

    @contextmanager
    def merge(self, number: int) -> Iterator[None]:
        """Around the merge of a call: it waits for the merge of the call before."""
        stream = self._streams[number % len(self._streams)]
        if self._last is not None:
            stream.wait_event(self._last)
        yield
        self._last = self._merged[number % len(self._streams)]
        self._last.record(stream)
