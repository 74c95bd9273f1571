"""Rows to move: how they may lie, and what should come of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.execution.control.visits import Rows

HEADS, FAR_ROWS, ROWS, WIDTH = 3, 40, 12, 8
PIECES = (Rows(2, 7, 0), Rows(20, 21, 5), Rows(30, 36, 6))


@dataclass(frozen=True)
class Lay:
    """How a tensor (heads, rows, width) that slots are filled from lies, and its
    dtype."""

    name: str
    dtype: torch.dtype = torch.float32
    width: int = WIDTH

    def made(self, device: str = "cpu", *, pinned: bool = False) -> torch.Tensor:
        """Such a tensor of random numbers."""
        gap = {"dense": 0, "gaps between rows": 4, "gaps between elements": 0}[
            self.name
        ]
        if self.name == "gaps between elements":
            shape = (HEADS, FAR_ROWS, self.width, 2)
        else:
            shape = (HEADS, FAR_ROWS, self.width + gap)
        whole = torch.randn(shape).to(self.dtype)
        whole = whole.pin_memory() if pinned else whole.to(device)
        return whole[..., 0] if whole.dim() == 4 else whole[..., : self.width]


LAYS = (
    Lay("dense"),
    Lay("dense", width=1),
    Lay("dense", dtype=torch.float16),
    Lay("gaps between rows"),
    Lay("gaps between elements"),
)


def loaded(far: torch.Tensor) -> torch.Tensor:
    """What a slot of zeros, fp32, holds once ``PIECES`` of ``far`` have been loaded."""
    slot = torch.zeros(HEADS, ROWS, far.shape[2])
    for piece in PIECES:
        slot[:, piece.local : piece.local + piece.stop - piece.start] = far[
            :, piece.start : piece.stop
        ].to(slot)
    return slot


def stored(far: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """What ``far`` holds once ``PIECES`` of ``slot`` have been stored to it."""
    found = far.cpu().clone()
    for piece in PIECES:
        rows = slot[:, piece.local : piece.local + piece.stop - piece.start]
        found[:, piece.start : piece.stop] = rows.to(found)
    return found


def n_bytes(slot: torch.Tensor) -> int:
    """Of ``PIECES``, as they are in the slot."""
    rows = sum(piece.stop - piece.start for piece in PIECES)
    return rows * HEADS * slot.shape[2] * slot.element_size()
