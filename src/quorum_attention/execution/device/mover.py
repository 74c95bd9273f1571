"""Moves rows between where tensors live and the slots, and keeps the stages of units in order.

One unit of work goes through three stages: *load* (inputs and travelling state into a slot),
*compute*, *store* (state and results out of it). Where copies run beside compute each stage has a
stream of its own, so that the next unit's load and the last unit's store run meanwhile; on the CPU
they simply follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from quorum_attention.decomposition import Rows
from quorum_attention.execution.device.clock import Clock


class Mover:
    """Moves rows in order, as on a CPU: a stage begins when the one before has happened.

    Attributes:
        loaded_bytes, stored_bytes: moved so far.
    """

    def __init__(self, clock: Clock) -> None:
        self.loaded_bytes = 0
        self.stored_bytes = 0
        self._clock = clock

    def input_stage(self, slot: int) -> AbstractContextManager[Any]:
        """The load of a unit's inputs into ``slot``, once its previous unit has left it."""
        return self._clock.timed("h2d")

    def state_stage(self, slot: int, after_store_of: int) -> AbstractContextManager[Any]:
        """The load of a unit's state; ``after_store_of``: the slot whose store comes first."""
        return self._clock.timed("h2d")

    def carried_from(self, slot: int) -> None:
        """Within a compute stage: what ``slot`` had to hand on has been taken."""

    def compute_stage(self, slot: int) -> AbstractContextManager[Any]:
        """The compute of the unit in ``slot``, after its load."""
        return nullcontext()

    def wait_computed(self, slot: int) -> None:
        """Hold the host until the unit in ``slot`` has been computed."""

    def store_stage(self, slot: int) -> AbstractContextManager[Any]:
        """The store of the unit in ``slot``, after its compute."""
        return self._clock.timed("d2h")

    def load(self, target: torch.Tensor, source: torch.Tensor, pieces: Sequence[Rows]) -> None:
        """Copy pieces of rows into a slot: source (heads, N, width) at ``start`` to ``stop``,
        target (heads, n, width) from ``local`` on. Within a stage."""
        for piece in pieces:
            part = local_part(target, piece)
            part.copy_(source[:, piece.start : piece.stop])
            self.loaded_bytes += part.numel() * part.element_size()

    def store(self, target: torch.Tensor, source: torch.Tensor, pieces: Sequence[Rows]) -> None:
        """Copy pieces of rows out of a slot: target as the source of ``load``, source as its
        target. Within a stage."""
        for piece in pieces:
            part = local_part(source, piece)
            target[:, piece.start : piece.stop].copy_(part)
            self.stored_bytes += part.numel() * part.element_size()

    def finish(self, *, wait: bool) -> None:
        """All stages before everything that follows; ``wait`` also holds the host until then."""


def local_part(slot: torch.Tensor, piece: Rows) -> torch.Tensor:
    """The rows of ``piece`` in a slot's field (heads, n, width)."""
    return slot[:, piece.local : piece.local + piece.stop - piece.start]
