"""The workers of a farm, whoever they are; and one in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from quorum_attention.devices.messages import Compute, Done, End, Failed
from quorum_attention.devices.scheduler import Hand
from quorum_attention.devices.worker import answer
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.farm.compute import Pass
from quorum_attention.farm.data import Source
from quorum_attention.farm.messages import Begin


class Crew(Protocol):
    """Workers that come and go."""

    @property
    def hands(self) -> list[Hand]:
        """All workers so far, also those that are gone, in the order in which they came."""

    @property
    def expected(self) -> int:
        """How many are there or wanted."""

    def recruits(self, wait: bool) -> list[Hand]:
        """Workers that have come since this was asked last; they are among ``hands`` from now on.

        Args:
            wait: for one, as long as one may come.
        """

    def listen(
        self, workers: Sequence[Any], seconds: float | None
    ) -> list[tuple[Any, Done | Failed | None]]:
        """What workers say next; None instead of an answer from one that is gone."""

    def kept(self, tensor: torch.Tensor) -> Source:
        """A tensor (batch, heads, rows, ...) of host memory, for workers to read."""

    def forget(self) -> None:
        """Let go of what was kept: the pass is over."""

    def close(self) -> None:
        """End the workers."""


class Here:
    """A worker in this process: it computes when it is asked for its answer.

    Args:
        device: where to compute.
        budget: bytes of it; None: what is free.
        unequal: whether other workers may have more.
    """

    def __init__(
        self, device: str | torch.device, budget: int | None = None, unequal: bool = False
    ) -> None:
        self._device, self._budget = torch.device(device), budget
        self.alive, self.unequal = True, unequal
        self.asked: Compute | None = None
        self._begins: dict[int, Begin] = {}
        self._passes: dict[int, Pass] = {}

    @property
    def label(self) -> str:
        """Its device, for people."""
        place = self._device
        return str(place) if on_host(place) else backend_of(place).model(place)

    def send(self, message: object) -> bool:
        """Take a message."""
        if isinstance(message, Begin):
            self._begins[message.number] = message
        elif isinstance(message, End):
            self._passes.pop(message.number, None)
            self._begins.pop(message.number, None)
        elif isinstance(message, Compute):
            self.asked = message
        return self.alive

    def kill(self) -> None:
        """Take no more messages."""
        self.alive, self.asked = False, None
        self._passes.clear()
        self._begins.clear()

    def answer(self) -> Done | Failed:
        """Compute what was asked for last."""
        assert self.asked is not None
        message, self.asked = self.asked, None
        return answer(self, message)

    def compute(self, message: Compute, report: Report) -> None:
        """Compute a unit. Inputs are opened for the first one, whose error it is if they cannot."""
        if message.number not in self._passes:
            begin = self._begins[message.number]
            self._passes[message.number] = Pass(begin, self._device, self._budget)
        self._passes[message.number].compute(message, report)


class Alone:
    """A crew of one worker, in this process."""

    def __init__(self, device: str | torch.device, budget: int | None = None) -> None:
        self.hands: list[Hand] = [Here(device, budget)]
        self.expected = 1

    def recruits(self, wait: bool) -> list[Hand]:
        """Nobody comes."""
        return []

    def listen(
        self, workers: Sequence[Any], seconds: float | None
    ) -> list[tuple[Any, Done | Failed | None]]:
        """Have the first one compute."""
        return [(workers[0], workers[0].answer())] if workers else []

    def kept(self, tensor: torch.Tensor) -> Source:
        """The tensor itself."""
        return tensor

    def forget(self) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        """End the worker."""
        for hand in self.hands:
            hand.kill()


__all__ = ["Alone", "Crew", "Here"]
