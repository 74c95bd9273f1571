"""Shares the keys in host memory between the bus and the cores, by measured rates.

Both work at the same time: a share of the keys crosses the bus to the device, which
attends over it, and the cores attend over the rest. The shares are such that both end
together. Rates are of work side by side, because both read the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

import torch

from quorum_attention.long_prompts.host_reader import (
    NEWS,
    HostReader,
    Piece,
    whole_pieces,
)
from quorum_attention.long_prompts.places import Place
from quorum_attention.long_prompts.segments import Segment
from quorum_attention.threads import start_executors

Statistics = tuple[torch.Tensor, torch.Tensor]

# Cores that give the device its work and copies meanwhile. A thread that had to share
# one of them would be the last one, and all others would wait for it.
_BUSY_CORES = 2
# Bytes a second until the cores were measured.
_ASSUMED_CORES_RATE = 40e9


class HostSharing:
    """How keys in host memory are shared, and the copies of the bus's share.

    Args:
        memory: (n_bytes,) uint8 on a CUDA device, for copies.

    Attributes:
        cores_rate: bytes a second that the cores attend over, as measured so far.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._reader = HostReader(memory)
        # Without a thread the cores begin when the device has its work.
        self._executors = start_executors(1, "attends on the cores")
        n_threads = torch.get_num_threads()
        for executor in self._executors:
            executor.submit(_keep_to, max(1, n_threads - _BUSY_CORES)).result()
        # Threads that begin later take the number that was set last, in whichever
        # thread.
        torch.set_num_threads(n_threads)
        self.cores_rate = _ASSUMED_CORES_RATE

    @property
    def bus_rate(self) -> float:
        """Bytes a second that cross the bus, as measured so far."""
        return self._reader.rate

    def forget(self) -> None:
        """Forget copies made ahead, because tokens were removed or put into another
        order."""
        self._reader.forget()

    def split(
        self, pieces: Sequence[Piece], *, for_cores: bool
    ) -> tuple[list[Piece], list[Piece]]:
        """Divide pieces in host memory and files between the bus and the cores.

        Args:
            for_cores: whether the cores are to have a share; if not, all that is
                page-locked goes over the bus.

        Returns:
            The pieces for the bus, each no larger than a buffer; and the others.
        """
        n_bytes = sum(piece.segment.nbytes for piece in pieces)
        cores_rate = self.cores_rate if for_cores else 0.0
        share = self.bus_rate / (self.bus_rate + cores_rate)
        bytes_left = share * n_bytes
        by_bus: list[Piece] = []
        by_cores: list[Piece] = []
        for piece in pieces:
            copyable = self._copyable(piece)
            n_copied = 0
            for part in copyable:
                # The number of pieces that is nearest to the share.
                if part.segment.nbytes > 2 * bytes_left:
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

    def following(self, segments: Sequence[Segment], *, for_cores: bool) -> list[Piece]:
        """Return the bus's share of what is read next; see ``split``."""
        pieces = []
        start = 0
        for segment in segments:
            if segment.place is not Place.DEVICE:
                pieces.append(Piece(start, segment))
            start += segment.n_tokens
        return self.split(pieces, for_cores=for_cores)[0]

    def staged_pieces(
        self, pieces: Sequence[Piece], following: Iterable[Piece]
    ) -> Iterator[Piece]:
        """Yield ``pieces`` on the device: see ``HostReader.staged_pieces``."""
        return self._reader.staged_pieces(pieces, following)

    def start_on_cores(
        self, attend: Callable[[], Statistics], pieces: Sequence[Piece]
    ) -> Callable[[], Statistics]:
        """Let the cores attend over ``pieces`` in a thread, and measure their rate.

        The caller meanwhile hands the device its work, which takes milliseconds.

        Args:
            attend: computes the statistics.

        Returns:
            A function that waits for the statistics.
        """
        n_bytes = sum(piece.segment.nbytes for piece in pieces)
        if not self._executors:
            return lambda: self._timed(attend, n_bytes, time.perf_counter())
        # The time until the thread begins counts, as copies over the bus begin at once.
        began = time.perf_counter()
        future: Future[Statistics] = self._executors[0].submit(
            self._timed, attend, n_bytes, began
        )
        return future.result

    @torch.no_grad()
    def _timed(
        self, attend: Callable[[], Statistics], n_bytes: int, began: float
    ) -> Statistics:
        statistics = attend()
        seconds = time.perf_counter() - began
        self.cores_rate += NEWS * (n_bytes / seconds - self.cores_rate)
        return statistics


def _keep_to(n_threads: int) -> None:
    """Let torch use ``n_threads`` for work of the thread that calls this."""
    torch.set_num_threads(n_threads)
    # torch looks at the process's number once in each thread: now, not when it is
    # another.
    torch.get_num_threads()
