"""Moves rows between tensors and slots, and keeps the stages of units in order.

A unit goes through three stages: *load* (inputs and travelling state into a slot), *compute*, and
*store* (state and results out of the slot). On a device with streams each stage has its own stream,
so the next unit loads and the last unit stores while a unit computes. On the CPU the stages follow
one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from quorum_attention.decomposition import Rows
from quorum_attention.execution.device.clock import Clock


class Mover:
    """Moves rows on the CPU, where a stage is done before the next begins.

    Attributes:
        loaded_bytes, stored_bytes: bytes moved into slots and out of them so far.
    """

    def __init__(self, clock: Clock) -> None:
        self.loaded_bytes = 0
        self.stored_bytes = 0
        self._clock = clock

    def input_stage(self, slot: int) -> AbstractContextManager[Any]:
        """A context for loading a unit's inputs into ``slot``.

        It comes after the slot's previous unit is stored.
        """
        return self._clock.timed("h2d")

    def state_stage(self, slot: int, after_store_of: int) -> AbstractContextManager[Any]:
        """A context for loading a unit's travelling state into ``slot``.

        It comes after the unit's inputs, and after the last store of slot ``after_store_of``.
        """
        return self._clock.timed("h2d")

    def carried_from(self, slot: int) -> None:
        """Note, in a compute stage, that all that is carried over from ``slot`` has been read."""

    def compute_stage(self, slot: int) -> AbstractContextManager[Any]:
        """A context for computing the unit in ``slot``; it comes after the unit's load."""
        return nullcontext()

    def wait_computed(self, slot: int) -> None:
        """Hold the host until the unit in ``slot`` is computed."""

    def store_stage(self, slot: int) -> AbstractContextManager[Any]:
        """A context for storing the unit in ``slot``; it comes after the unit's compute."""
        return self._clock.timed("d2h")

    def load(self, target: torch.Tensor, source: torch.Tensor, pieces: Sequence[Rows]) -> None:
        """Copy rows into a slot, within a load stage.

        Args:
            target: a field of the slot, (heads, n, width); gets each piece from ``local`` on.
            source: (heads, N, width); each piece is its rows [start, stop).
            pieces: the rows.
        """
        for piece in pieces:
            part = local_part(target, piece)
            part.copy_(source[:, piece.start : piece.stop])
            self.loaded_bytes += part.numel() * part.element_size()

    def store(self, target: torch.Tensor, source: torch.Tensor, pieces: Sequence[Rows]) -> None:
        """Copy rows out of a slot, within a store stage; target and source as the source and the
        target of ``load``."""
        for piece in pieces:
            part = local_part(source, piece)
            target[:, piece.start : piece.stop].copy_(part)
            self.stored_bytes += part.numel() * part.element_size()

    def left(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that after the stages given so far nothing is copied from or to ``tensors``: heads
        of what was loaded from and stored to, each named once."""

    def finish(self, *, wait: bool) -> None:
        """Let all later work come after all stages; with ``wait`` hold the host until they are
        done."""


def local_part(slot: torch.Tensor, piece: Rows) -> torch.Tensor:
    """The rows of ``piece`` in a slot's field (heads, n, width)."""
    return slot[:, piece.local : piece.local + piece.stop - piece.start]
