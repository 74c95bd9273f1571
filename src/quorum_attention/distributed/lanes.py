"""Two streams for what is computed one after the other, so that no end of a kernel is idle."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


class Lanes:
    """The current stream and, on a GPU, another one, by turns.

    Tensors that are made in one lane are read in it alone, or after ``join``; what was made before
    in the current stream may be read in both, and lives until ``join``.

    Attributes:
        several: whether there is another stream.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.several = device.type == "cuda" and count > 1
        if self.several:
            self._main, self._other = torch.cuda.current_stream(device), _stream(device)
            self._other.wait_stream(self._main)

    def of(self, number: int) -> AbstractContextManager[object]:
        """Within it, the lane of that number is the current stream."""
        if not self.several or number % 2 == 0:
            return nullcontext()
        return torch.cuda.stream(self._other)

    def join(self) -> None:
        """Have the current stream wait for the other."""
        if self.several:
            self._main.wait_stream(self._other)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


__all__ = ["Lanes"]
