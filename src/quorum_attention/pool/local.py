"""Tensors of a part where its device can have them.

Memory of another GPU is no operand of an attention call. So a part's inputs there are copied to its
own device, from GPU to GPU, where the budget has room for them, and to host memory where it has
not; results made here are copied there at the end.

No kernel of this device may write there. The memory is another process's, and a kernel of one GPU
that writes to such memory of another one is an illegal access, after which the process can compute
nothing more (docs/devices.md). Copies by the driver reach it. torch has them where both sides are
contiguous and of one dtype, and launches a kernel of the source's GPU where they are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from quorum_attention.execution.device.lookup import HOST, on_host

# Bytes that lie beside a result on another GPU, on their way into it.
_PIECE_BYTES = 8 << 20


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
            put(target, made)
        self.results.clear()

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return on_host(tensor.device) or tensor.device == self._device


def put(target: torch.Tensor, made: torch.Tensor) -> None:
    """Copy a result to where it belongs, by no kernel of the device where it was made if that is on
    another one (see the top of this file)."""
    if _is_near(target, made):
        target.copy_(made)
        return
    for there, here in _pieces(target, made):
        sent = here.to(there.dtype).contiguous()
        if there.is_contiguous():
            there.copy_(sent)
        else:
            there.copy_(torch.empty_like(sent, device=there.device).copy_(sent))


def _is_near(target: torch.Tensor, made: torch.Tensor) -> bool:
    return on_host(target.device) or target.device == made.device


def _pieces(
    target: torch.Tensor, made: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of one shape in pieces that are small, or that need nothing beside them."""
    alike = target.dtype == made.dtype and target.is_contiguous() and made.is_contiguous()
    if alike or max(target.nbytes, made.nbytes) <= _PIECE_BYTES:
        yield target, made
        return
    at = next(dim for dim, size in enumerate(made.shape) if size > 1)
    half, size = made.shape[at] // 2, made.shape[at]
    for start, length in ((0, half), (half, size - half)):
        yield from _pieces(target.narrow(at, start, length), made.narrow(at, start, length))


__all__ = ["Local", "put"]
