"""Shares the keys in host memory between the bus and the cores.

Both work at the same time: a share of the keys crosses the bus to the device, which
attends over it, and the cores attend over the rest. Whichever ends first gets a little
more the next time, so both soon end together. Rates would not say what the shares have
to be: both read the same memory, and the bus begins ahead of the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from quorum_attention.long_prompts.host_reader import (
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
# The bus's share at first, and what it changes by.
_FIRST_BUS_SHARE = 0.6
_STEP = 0.02


class HostSharing:
    """How keys in host memory are shared, and the copies of the bus's share.

    Args:
        memory: (n_bytes,) uint8 on a CUDA device, for copies.

    Attributes:
        bus_share: the share of the keys that crosses the bus, from 0 to 1.
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
        self.bus_share = _FIRST_BUS_SHARE

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
        bytes_left = (self.bus_share if for_cores else 1.0) * n_bytes
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
        self, attend: Callable[[], Statistics]
    ) -> Callable[[], Statistics]:
        """Let the cores attend in a thread.

        The caller meanwhile hands the device its work, which takes milliseconds.

        Args:
            attend: computes the statistics.

        Returns:
            A function that waits for the statistics.
        """
        if not self._executors:
            return attend
        future = self._executors[0].submit(torch.no_grad()(attend))
        return partial(self._wait, future)

    def _wait(self, future: Future[Statistics]) -> Statistics:
        """Wait for the cores, and change the shares by who was first."""
        were_cores_first = future.done()
        statistics = future.result()
        is_bus_done = self._reader.is_done
        if not is_bus_done:
            self.bus_share = max(0.0, self.bus_share - _STEP)
        elif not were_cores_first:
            self.bus_share = min(1.0, self.bus_share + _STEP)
        return statistics


def _keep_to(n_threads: int) -> None:
    """Let torch use ``n_threads`` for work of the thread that calls this."""
    torch.set_num_threads(n_threads)
    # torch looks at the process's number once in each thread: now, not when it is
    # another.
    torch.get_num_threads()
