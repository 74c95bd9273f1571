"""Tensors of a part where its device can have them.

Memory of another GPU is no operand of an attention call. So a part's inputs there are copied to its
own device, from GPU to GPU, where the budget has room for them, and to host memory where it has
not; results made here are copied there at the end.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quorum_attention.execution.device.lookup import HOST, on_host


class Local:
    """The tensors of one part.

    Args:
        device: what computes it.
        room: bytes that copies may take there.
        tensors: all of the part's.

    Attributes:
        results: (where it belongs, where it was made) of each result that has to be copied.
        copied_bytes: of copies on the device, which count against the part's budget.
    """

    def __init__(self, device: torch.device, room: int, tensors: Iterable[torch.Tensor]) -> None:
        self._device = self._place = device
        if sum(t.nbytes for t in tensors if not self._is_here(t)) > room:
            self._place = HOST
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copied_bytes = 0

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input, copied if it is on another GPU."""
        if self._is_here(tensor):
            return tensor
        self.copied_bytes += 0 if on_host(self._place) else tensor.nbytes
        return tensor.to(self._place)

    def result(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where to make a result: its own place, or one here."""
        if self._is_here(tensor):
            return tensor
        self.copied_bytes += 0 if on_host(self._place) else tensor.nbytes
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._place)
        self.results.append((tensor, made))
        return made

    def store(self) -> None:
        """Copy results to where they belong."""
        for target, made in self.results:
            target.copy_(made)
        self.results.clear()

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return on_host(tensor.device) or tensor.device == self._device


__all__ = ["Local"]
