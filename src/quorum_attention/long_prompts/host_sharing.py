"""Shares the keys in host memory between the bus and the cores.

Both work at the same time: the device reads a share of the keys across the bus, and the
cores attend over the rest. Whichever ends first gets a little more the next time, so
both soon end together. Rates would not say what the shares have to be: both read the
same memory, and the bus begins ahead of the cores.

While the cores attend, the host launches nothing. So a bus that rested between two
layers, with all of its share copied ahead, gets more too: where the host's launches
take longer than the bus, the cores have little or nothing to do. A bus that rested
because the buffer for copies was full gets no more for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.long_prompts.host_reader import HostReader, Piece
from quorum_attention.long_prompts.places import Place
from quorum_attention.long_prompts.segments import Segment

# The bus's share at first, and what it changes by.
_FIRST_BUS_SHARE = 0.6
_STEP = 0.02
# So few bytes are the bus's alone: it reads them while the cores would only begin.
_FEW_BYTES = 8 << 20
# The cores get a multiple of so many keys: they cut them into blocks, and what is left
# over would be another call.
_CORES_TOGETHER = 128


class HostSharing:
    """How keys in host memory are shared, and the copies made ahead for the bus.

    Args:
        memory: (n_bytes,) uint8 on a CUDA device, for copies.

    Attributes:
        bus_share: the share of the keys that crosses the bus, from 0 to 1.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._reader = HostReader(memory)
        self._device = memory.device
        # Recorded behind the device's attention.
        self._is_attended = torch.cuda.Event()
        self._has_bus_rested = False
        self.bus_share = _FIRST_BUS_SHARE
        # Forks of a cache may be used in several threads.
        self._attending = threading.RLock()

    @contextmanager
    def of_one_call(self) -> Iterator[HostSharing | None]:
        """Yield this to one call at a time. A call of another thread meanwhile gets
        None, and leaves all keys to the cores: to copy ahead for it would write over
        what the first call's attention is about to read."""
        if not self._attending.acquire(blocking=False):
            yield None
            return
        try:
            yield self
        finally:
            self._attending.release()

    def forget(self) -> None:
        """Forget copies made ahead, because tokens were removed or put into another
        order."""
        self._reader.forget()

    def split(self, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
        """Divide pieces in host memory and files between the bus and the cores.

        Returns:
            The pieces for the bus, in page-locked memory; and the others.
        """
        bytes_left: float = _bytes_of(pieces)
        if not _are_few(pieces):
            bytes_left *= self.bus_share
        by_bus: list[Piece] = []
        by_cores: list[Piece] = []
        for piece in pieces:
            n_tokens = piece.segment.n_tokens
            n_read = self._n_read_by_bus(piece.segment, bytes_left)
            if n_read > 0:
                by_bus.append(piece.first(n_read))
                bytes_left -= by_bus[-1].segment.nbytes
            if n_read < n_tokens:
                by_cores.append(piece.behind(n_read))
        return by_bus, by_cores

    def _n_read_by_bus(self, segment: Segment, n_bytes: float) -> int:
        """How many of a segment's first tokens fill ``n_bytes``."""
        if segment.place is not Place.HOST or not segment.key.is_pinned():
            return 0
        n_fitting = min(int(n_bytes / segment.token_bytes), segment.n_tokens)
        n_by_cores = round_up(segment.n_tokens - n_fitting, _CORES_TOGETHER)
        return max(0, segment.n_tokens - n_by_cores)

    def arrived(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return pieces for the bus as the device reads them; see
        ``HostReader.arrived``."""
        self._has_bus_rested = False
        if not pieces:
            return []
        arrived = [*self._reader.arrived(pieces[0]), *pieces[1:]]
        had_all = len(arrived) == 1
        self._has_bus_rested = had_all and self._reader.was_idle
        return arrived

    def copy_ahead(self, next_segments: Sequence[Segment]) -> None:
        """Copy what the bus reads first of the next segments, behind the attention that
        the current stream has been given."""
        self._is_attended.record(torch.cuda.current_stream(self._device))
        pieces = [
            Piece(0, segment)
            for segment in next_segments
            if segment.place is not Place.DEVICE
        ]
        by_bus, _ = self.split(pieces)
        if by_bus and not _are_few(pieces):
            self._reader.copy_ahead(by_bus[0].segment)

    def adjust(self, pieces: Sequence[Piece]) -> None:
        """Change the shares, at the moment when the cores are done with their part of
        ``pieces``, or have nothing to do."""
        if _are_few(pieces):
            return
        is_bus_first = self._has_bus_rested or self._is_attended.query()
        change = _STEP if is_bus_first else -_STEP
        self.bus_share = min(1.0, max(0.0, self.bus_share + change))


def _are_few(pieces: Sequence[Piece]) -> bool:
    """Whether pieces in host memory are too small to be shared: the tokens of a
    question, not those of a text."""
    return _bytes_of(pieces) <= _FEW_BYTES


def _bytes_of(pieces: Sequence[Piece]) -> int:
    return sum(piece.segment.nbytes for piece in pieces)
