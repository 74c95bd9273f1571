"""Tensors that are kept for a backward: where they are, or in page-locked host memory.

Copies both ways run on a stream of their own, beside the computation.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from quorum_attention.arithmetic import power_of_two_from
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.recipes.tile_storage import SideStream

# A tensor goes to host memory in pieces of this many bytes: torch gives page-locked
# memory in powers of two.
_PIECE = 256 << 20
_CGROUP = Path("/sys/fs/cgroup")


class KeptTensor:
    """A tensor that stays where it is until a backward needs it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version

    def finish_copy(self) -> None:
        """Check that the tensor is as it was: where saved tensors have hooks, torch
        does not look.

        Raises:
            RuntimeError: it was written to.
        """
        if self._tensor is not None and self._tensor._version != self._version:
            raise RuntimeError(
                "a layer's input or attention's output, which its checkpoint keeps, "
                "was written to in place: use long_context(checkpoints=None)"
            )

    def fetch(self) -> None:
        """Begin to bring the tensor back."""

    def get(self) -> torch.Tensor:
        """Return the tensor on its device."""
        self.finish_copy()
        assert self._tensor is not None
        return self._tensor.detach()


class OffloadedTensor(KeptTensor):
    """A tensor that goes to page-locked host memory, and comes back for the backward.

    Args:
        tensor: the tensor.
        stream: copies it both ways.

    Attributes:
        alive_bytes: host memory of all such tensors.
        peak_bytes: the most that there ever was: torch keeps that for later ones.
    """

    alive_bytes = 0
    peak_bytes = 0

    def __init__(self, tensor: torch.Tensor, stream: SideStream) -> None:
        super().__init__(tensor)
        self._stream = stream
        self._device = tensor.device
        self._layout = torch.empty_like(tensor, device="meta")  # without gaps
        # The tensor on its way back, and the copy's event.
        self._returning: tuple[torch.Tensor, Any] | None = None
        is_dense = tensor.stride() == self._layout.stride()
        dense = tensor if is_dense else tensor.clone()
        sources = _bytes_of(dense).split(_PIECE)
        self._pieces = [
            stream.empty_on_host(source.shape, source.dtype) for source in sources
        ]
        # The computation waits before the memory of ``dense`` is used again: a host far
        # ahead of the device would find none free.
        self._leaving: tuple[torch.Tensor, Any] | None = (
            dense,
            stream.copy(self._pieces, sources),
        )
        self._host_bytes = sum(
            power_of_two_from(piece.numel()) for piece in self._pieces
        )
        OffloadedTensor.alive_bytes += self._host_bytes
        OffloadedTensor.peak_bytes = max(
            OffloadedTensor.peak_bytes, OffloadedTensor.alive_bytes
        )

    def __del__(self) -> None:
        OffloadedTensor.alive_bytes -= getattr(self, "_host_bytes", 0)
        if getattr(self, "_returning", None) is not None:
            self.get()  # it is on its way, and nobody asked for it

    def finish_copy(self) -> None:
        """Let the computation wait for the copy, check the tensor, and let go of it."""
        if self._leaving is not None:
            _, event = self._leaving
            self._stream.wait(event)
        super().finish_copy()
        self._leaving = None
        self._tensor = None

    def fetch(self) -> None:
        """Begin to bring the tensor back."""
        if self._returning is None:
            tensor = torch.empty_like(self._layout, device=self._device)
            targets = _bytes_of(tensor).split(_PIECE)
            self._returning = (tensor, self._stream.copy(targets, self._pieces))

    def get(self) -> torch.Tensor:
        """Return a copy on the tensor's device."""
        self.finish_copy()
        self.fetch()
        assert self._returning is not None
        tensor, event = self._returning
        self._returning = None
        self._stream.wait(event)
        return tensor


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without gaps, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def host_room() -> int:
    """Return the bytes of host memory that this rank may page-lock: its share of what
    the machine and the process's group have free, less a sixth, and what torch holds
    from earlier steps."""
    host = torch.device("cpu")
    free: int = backend_of(host).free_bytes(host)
    with suppress(OSError, ValueError, KeyError):  # no limit, or none that is known
        free = min(free, _free_bytes_of_group())
    n_ranks = int(
        os.environ.get("LOCAL_WORLD_SIZE") or 1
    )  # of this host, under torchrun
    n_held = OffloadedTensor.peak_bytes - OffloadedTensor.alive_bytes
    return page_locked_share(max(0, free)) // max(1, n_ranks) + n_held


def _free_bytes_of_group() -> int:
    """Return what the control group of this process may still take of memory."""
    statistics = (_CGROUP / "memory.stat").read_text()
    sizes = dict(line.split() for line in statistics.splitlines())
    # Cached pages of files that nobody uses are given up when memory is asked for.
    reclaimable = int(sizes["inactive_file"])
    used = int((_CGROUP / "memory.current").read_text())
    limit = int((_CGROUP / "memory.max").read_text())
    return limit - (used - reclaimable)


def page_locked_share(host_bytes: int) -> int:
    """Return the bytes of host memory that checkpoints page-lock at most: all but a
    sixth."""
    return host_bytes * 5 // 6
