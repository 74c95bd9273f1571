"""Shares the keys in host memory between the bus and the cores, by measured rates.

Both work at the same time: a share of the keys crosses the bus to the device, which attends over
it, and the cores attend over the rest. The shares are such that both end together. Rates are of
work side by side, because both read the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from quorum_attention.long_prompts.host_reader import HostReader, Piece, whole_pieces
from quorum_attention.long_prompts.places import Place
from quorum_attention.long_prompts.segments import Segment

# Assumed rates until some were measured, in bytes a second.
_BUS_RATE = 50e9
_CORES_RATE = 40e9
# How much of a new measurement goes into a rate.
_NEWS = 0.2


class HostSharing:
    """How keys in host memory are shared, and the copies of the bus's share.

    Args:
        memory: (n_bytes,) uint8 on a CUDA device, for copies.

    Attributes:
        bus_rate, cores_rate: bytes a second, as measured so far.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._reader = HostReader(memory)
        self.bus_rate = _BUS_RATE
        self.cores_rate = _CORES_RATE

    def forget(self) -> None:
        """Forget copies made ahead, because tokens were removed or put into another order."""
        self._reader.forget()

    def split(self, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
        """Divide pieces in host memory and files between the bus and the cores.

        Returns:
            The pieces for the bus, each no larger than a buffer; and the others, for the cores.
        """
        n_bytes = sum(piece.segment.nbytes for piece in pieces)
        share = self.bus_rate / (self.bus_rate + self.cores_rate)
        bytes_left = share * n_bytes
        by_bus: list[Piece] = []
        by_cores: list[Piece] = []
        for piece in pieces:
            copyable = self._copyable(piece)
            n_copied = 0
            for part in copyable:
                if part.segment.nbytes > bytes_left:
                    break
                bytes_left -= part.segment.nbytes
                n_copied += part.segment.n_tokens
                by_bus.append(part)
            if n_copied < piece.segment.n_tokens:
                rest = piece.segment.narrow(n_copied, piece.segment.n_tokens)
                by_cores.append(Piece(piece.start + n_copied, rest))
        return by_bus, by_cores

    def _copyable(self, piece: Piece) -> list[Piece]:
        segment = piece.segment
        if segment.place is not Place.HOST or not segment.key.is_pinned():
            return []
        return whole_pieces(piece.start, segment, self._reader.piece_bytes)

    def following(self, segments: Sequence[Segment]) -> list[Piece]:
        """Return the bus's share of what is read next."""
        pieces = []
        start = 0
        for segment in segments:
            if segment.place is not Place.DEVICE:
                pieces.append(Piece(start, segment))
            start += segment.n_tokens
        return self.split(pieces)[0]

    def staged_pieces(self, pieces: Sequence[Piece], following: Iterable[Piece]) -> Iterator[Piece]:
        """Yield ``pieces`` on the device: see ``HostReader.staged_pieces``."""
        return self._reader.staged_pieces(pieces, following)

    @contextmanager
    def timed_cores(self, pieces: Sequence[Piece]) -> Iterator[None]:
        """Measure the cores' rate over ``pieces`` during the ``with`` block."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        n_bytes = sum(piece.segment.nbytes for piece in pieces)
        self.cores_rate += _NEWS * (n_bytes / seconds - self.cores_rate)
