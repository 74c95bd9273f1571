"""A farm's workers in processes of this machine, without Ray: a device may have several of them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from quorum_attention.call.mapped import Mappings
from quorum_attention.devices.buffers import Shared
from quorum_attention.devices.messages import Compute, Done, Failed, Ready
from quorum_attention.devices.processes import Worker, end, end_after, listen, start
from quorum_attention.devices.scheduler import Hand
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.farm.crew import Here
from quorum_attention.farm.data import Back, Piece, Source


class Processes:
    """A crew of worker processes; one that dies is not replaced.

    Args:
        devices: of each worker, as torch writes them; two of one device load and store while the
            other computes.
        budget: device bytes of each.
        threads: of each, for CPU devices.
    """

    def __init__(
        self, devices: Sequence[str], budget: int | None = None, threads: int | None = None
    ) -> None:
        self._workers = start(devices, threads, partial(_obey, budget=budget))
        end_after(self, self._workers)
        self._kept: list[Shared] = []
        self.hands: list[Hand] = [_Remembering(one) for one in self._workers]
        self.expected = len(self.hands)

    def recruits(self, wait: bool) -> list[Hand]:
        """Nobody comes."""
        return []

    def listen(
        self, workers: Sequence[Any], seconds: float | None
    ) -> list[tuple[Any, Done | Failed | None]]:
        """What workers say next; None instead of an answer from one that is gone."""
        hands = {id(hand.worker): hand for hand in workers}
        heard: Any = listen([hand.worker for hand in workers], seconds)
        return [(hands[id(worker)], hands[id(worker)].heard(said)) for worker, said in heard]

    def kept(self, tensor: torch.Tensor) -> Source:
        """The tensor in shared memory."""
        found: Any = Shared.of(tensor, Mappings.now())
        self._kept.append(found)
        source: Source = found.handle
        return source

    def forget(self) -> None:
        """Let go of copies."""
        self._kept.clear()

    def close(self) -> None:
        """End the workers."""
        end(self._workers)


class _Remembering:
    """A worker that remembers where what it sends back belongs."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._back: Any = None

    @property
    def alive(self) -> bool:
        return self.worker.alive

    @property
    def label(self) -> str:
        return self.worker.label

    def send(self, message: object) -> bool:
        if isinstance(message, Compute):
            self._back = message.sums
        return self.worker.send(message)

    def heard(self, said: tuple[Done | Failed, list[Piece]] | None) -> Done | Failed | None:
        if said is not None and isinstance(self._back, Back):
            self._back.pieces = said[1]
        return None if said is None else said[0]

    def kill(self) -> None:
        self.worker.kill()


def _obey(device: str, threads: int | None, pipe: Connection, budget: int | None) -> None:
    """What a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the farm ends its workers itself
    if threads is not None:
        torch.set_num_threads(threads)
    place = torch.device(device)
    backend = backend_of(place)
    with backend.current(place):
        torch.empty(1, device=place)  # opens the device, which takes a while
        here = Here(place, budget)
        pipe.send(Ready(device if on_host(place) else backend.model(place)))
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                return  # the farm is gone
            if message is None:
                return
            here.send(message)
            if isinstance(message, Compute):
                said = here.answer()
                pieces = message.sums.pieces if isinstance(message.sums, Back) else []
                try:
                    pipe.send((said, pieces))
                except ConnectionError:
                    return


__all__ = ["Processes"]
