"""Two streams of a GPU, so that a turn's kernel begins while that of the turn before still ends.

Memory belongs to the stream on which it was allocated, and may be given out again as soon as
nobody holds it. So what is used on another stream is recorded for that one, and what is being sent
is held until the streams have met.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch


class TwoStreams:
    """Turns are computed on the current stream and on one beside it, alternately.

    Made when everything that turns read has been enqueued on the current stream.

    Args:
        device: of the call.
        two: whether there are two; else everything is on the current stream, or on no GPU.
    """

    def __init__(self, device: torch.device, two: bool) -> None:
        self._main: Any = None
        self._held: list[Any] = []
        if two and device.type == "cuda":
            self._main, self._side = torch.cuda.current_stream(device), _beside(device)
            self._side.wait_stream(self._main)

    def turn(self, number: int) -> AbstractContextManager[Any]:
        """Within it, turn ``number`` is computed."""
        if self._main is None or number % 2 == 0:
            return nullcontext()
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return stream

    def reads(self, number: int, *tensors: torch.Tensor | None) -> None:
        """Turn ``number`` reads what may be of the other stream; held until ``meet``."""
        if self._main is None:
            return
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._side if number % 2 else self._main)
                self._held.append(tensor)

    def leaves(self, *tensors: torch.Tensor) -> None:
        """A turn has made what the current stream will read."""
        if self._main is not None:
            for tensor in tensors:
                tensor.record_stream(self._main)

    def catch_up(self, number: int) -> None:
        """Turn ``number`` goes on when all turns before it are done."""
        if self._main is not None:
            ahead, behind = (self._side, self._main) if number % 2 else (self._main, self._side)
            ahead.wait_stream(behind)

    def meet(self) -> None:
        """The current stream goes on when all turns are done."""
        if self._main is not None:
            self._main.wait_stream(self._side)
        self._held.clear()


@lru_cache(maxsize=64)
def _beside(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


__all__ = ["TwoStreams"]
