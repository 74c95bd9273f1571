"""Streams of a GPU on which several kernel calls run at once.

An attention kernel works in waves, each with as many tiles as there are
multiprocessors. In the last wave part of the device is idle until the slowest tile is
done. A second call on another stream uses that time (docs/kernels.md).

Memory belongs to the stream on which it was allocated, and may be given out again as
soon as it is freed. So what is used on another stream is recorded for that one, and
what is being sent is held until the streams have met.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch


class KernelStreams:
    """Streams of one device for the kernel calls of a task, used in turn.

    Merges still follow each other. The streams are created once for a pass.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        numbers = range(count)
        self._streams = [torch.cuda.Stream(device) for _ in numbers]
        self._merged = [torch.cuda.Event() for _ in numbers]
        # The event after the last merge of the task; None before the first.
        self._last_merge: torch.cuda.Event | None = None

    @contextmanager
    def task(self) -> Iterator[None]:
        """Around a task: its calls wait for the current stream, which then waits for
        them."""
        main = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(main)
        self._last_merge = None
        try:
            yield
        finally:
            for stream in self._streams:
                main.wait_stream(stream)

    def call(self, number: int) -> AbstractContextManager[None]:
        """Around the ``number``-th call of a task: runs it on its stream."""
        return torch.cuda.stream(self._streams[number % len(self._streams)])

    @contextmanager
    def merge(self, number: int) -> Iterator[None]:
        """Around the merge of a call: it waits for the merge of the call before."""
        stream = self._streams[number % len(self._streams)]
        if self._last_merge is not None:
            stream.wait_event(self._last_merge)
        yield
        self._last_merge = self._merged[number % len(self._streams)]
        self._last_merge.record(stream)


class TwoStreams:
    """Turns are computed on the current stream and on one beside it, alternately, so
    that a turn's kernel begins while that of the turn before still ends.

    Made when everything that turns read has been enqueued on the current stream.

    Args:
        device: of the call.
        two: whether there are two; else everything is on the current stream, or on no
            GPU.
    """

    def __init__(self, device: torch.device, two: bool) -> None:
        self._main: Any = None
        self._in_use: list[Any] = []
        if two and device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._side = _side_stream(device)
            self._side.wait_stream(self._main)

    def turn(self, number: int) -> AbstractContextManager[Any]:
        """Within it, turn ``number`` is computed."""
        if self._main is None or number % 2 == 0:
            return nullcontext()
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return stream

    def reads(self, number: int, *tensors: torch.Tensor | None) -> None:
        """Turn ``number`` reads what may be of the other stream; held until
        ``meet``."""
        if self._main is None:
            return
        reader = self._side if number % 2 else self._main
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(reader)
                self._in_use.append(tensor)

    def leaves(self, *tensors: torch.Tensor) -> None:
        """A turn has made what the current stream will read."""
        if self._main is None:
            return
        for tensor in tensors:
            tensor.record_stream(self._main)

    def meet(self) -> None:
        """The current stream goes on when all turns are done."""
        if self._main is not None:
            self._main.wait_stream(self._side)
        self._in_use.clear()


@lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> Any:
    """The stream of ``device`` for every other turn, made once."""
    return torch.cuda.Stream(device)
