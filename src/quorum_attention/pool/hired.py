"""A worker in one pass: what it is sent is made for it, and taken back if it is lost."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from quorum_attention.execution.device.cuda import Handed
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.pool.messages import Begin, Compute, End, Ended
from quorum_attention.pool.shared import Handle, Shared
from quorum_attention.pool.workers import Worker

# A worker that has not let go of a pass's tensors after so long is given up.
_CONFIRM_SECONDS = 10.0


class Hired:
    """A worker as the coordinator of a pass has it.

    Args:
        worker: of the pool.
        budget: bytes that each of its parts may take on its device; None: what is free.
    """

    def __init__(self, worker: Worker, budget: int | None) -> None:
        self._worker, self._budget = worker, budget
        self._given: list[Handed] = []

    @property
    def alive(self) -> bool:
        """Whether it has not ended, nor been given up."""
        return self._worker.alive

    @property
    def label(self) -> str:
        """Its device, for people."""
        return self._worker.label

    @property
    def pipe(self) -> Any:
        """To listen to it."""
        return self._worker.pipe

    @property
    def may_wait(self) -> bool:
        """Whether orders may wait at it."""
        return self._worker.shelf is not None

    def queue(self, message: Compute) -> bool:
        """Have an order wait until the worker has done the one before; False if it cannot."""
        if any(not on_host(one.device) for one in (message.sums or {}).values()
               if isinstance(one, torch.Tensor)):  # fmt: skip
            return False  # what is taken back was given to nobody
        return self._worker.queue(self._with_sums(message))

    def withdraw(self) -> bool:
        """Take back what waits; False if the worker has it already."""
        return self._worker.withdraw()

    def send(self, message: object) -> bool:
        """Send a message; False if the worker is gone. After the last one of a pass no memory of a
        device that this worker was given counts as taken: it has let go of it, or is ended."""
        if isinstance(message, End) and self._given:
            return self._end(message)
        if isinstance(message, Begin):
            tensors = {name: self._given_to(one) for name, one in message.tensors.items()}
            message = replace(message, tensors=tensors, budget=self._budget)
        elif isinstance(message, Compute):
            message = self._with_sums(message)
        return self._worker.send(message)

    def _with_sums(self, message: Compute) -> Compute:
        if message.sums is None:
            return message
        sums = {name: self._given_to(one) for name, one in message.sums.items()}
        return replace(message, sums=sums)

    def _end(self, message: End) -> bool:
        limit = time.monotonic() + _CONFIRM_SECONDS
        try:
            if self._worker.send(replace(message, confirm=True)):
                while self.pipe.poll(max(0.0, limit - time.monotonic())):
                    if self.pipe.recv() == Ended(message.number):
                        self._given.clear()
                        return True
        except (EOFError, OSError):
            pass  # it was killed before it had let go
        self.kill()
        return False

    def kill(self) -> None:
        """End it at once. What it had of devices' memory counts as given back."""
        self._worker.kill()
        for one in self._given:
            with suppress(Exception):
                one.release()
        self._given.clear()

    def _given_to(self, handle: Handle) -> Handle:
        if not isinstance(handle, torch.Tensor):
            return handle
        if on_host(handle.device):
            return Shared.made(handle).handle
        made = Handed.of(handle)
        self._given.append(made)
        return made


__all__ = ["Hired"]
