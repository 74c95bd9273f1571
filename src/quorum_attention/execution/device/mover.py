"""Moves rows between tensors and slots, and keeps the stages of units in order.

A unit goes through three stages: *load* (inputs and travelling state into a slot),
*compute*, and *store* (state and results out of the slot). On a device with streams
each stage has its own stream, so the next unit loads and the last unit stores while a
unit computes. On the CPU the stages follow
one another: its streams have nothing to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from quorum_attention.decomposition import Rows
from quorum_attention.execution.device.clock import Clock


class ImmediateStream:
    """A stream, or an event, of a device whose work is done when a call returns.

    Its methods are those that a mover needs of torch.cuda.Stream and torch.cuda.Event.
    """

    def record(self, stream: Any) -> None:
        """Let the event happen after all work that ``stream`` was given so far."""

    def wait_event(self, event: Any) -> None:
        """Let later work wait for the event; do nothing if none was recorded."""

    def wait_stream(self, stream: Any) -> None:
        """Let later work wait for all work that ``stream`` was given so far."""

    def synchronize(self) -> None:
        """Hold the host until all work is done, or the event has happened."""

    def query(self) -> bool:
        """Return whether all work is done, or the event has happened."""
        return True


class Mover:
    """Moves rows, and keeps the stages of units in order; this one copies at once.

    Args:
        streams: of loads, of compute (the caller's stream), and of stores.
        event: makes an event of such streams.

    Attributes:
        loaded_bytes, stored_bytes: bytes moved into slots and out of them so far.
        up, compute, down: the streams.
    """

    def __init__(
        self,
        clock: Clock,
        n_slots: int,
        streams: Sequence[Any] = (ImmediateStream(),) * 3,
        event: Callable[[], Any] = ImmediateStream,
    ) -> None:
        self.loaded_bytes = 0
        self.stored_bytes = 0
        self._clock = clock
        self.up, self.compute, self.down = streams
        # Work given before this call may still write the inputs or use the arena's
        # memory.
        self.up.wait_stream(self.compute)
        self.down.wait_stream(self.compute)
        # Events of each slot: its unit is loaded, computed, stored; the next unit has
        # read what it carries over.
        self._ready = [event() for _ in range(n_slots)]
        self._computed = [event() for _ in range(n_slots)]
        self._stored = [event() for _ in range(n_slots)]
        self._handed_on = [event() for _ in range(n_slots)]
        self._event = event
        # Calls that wait for stores, in order: the event after the stores, the call.
        self._notices: deque[tuple[Any, Callable[[], None]]] = deque()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which what is launched goes to ``stream``."""
        return nullcontext()

    def issue(self, stream: Any, *, given_up: bool) -> None:
        """Give ``stream`` the copies that its stage noted; with ``given_up`` forget
        them."""

    def input_stage(self, slot: int) -> AbstractContextManager[None]:
        """A context for loading a unit's inputs into ``slot``.

        It comes after the slot's previous unit is stored, and after the next unit has
        read what it carries over.
        """
        return self._stage(
            self.up,
            [self._stored[slot], self._handed_on[slot]],
            None,
            "h2d",
        )

    def state_stage(
        self, slot: int, after_store_of: int
    ) -> AbstractContextManager[None]:
        """A context for loading a unit's travelling state into ``slot``.

        It comes after the unit's inputs, and after the last store of slot
        ``after_store_of``.
        """
        return self._stage(
            self.up,
            [self._stored[after_store_of]],
            self._ready[slot],
            "h2d",
        )

    def carried_from(self, slot: int) -> None:
        """Note, in a compute stage, that all that is carried over from ``slot`` has
        been read."""
        self._handed_on[slot].record(self.compute)

    def compute_stage(self, slot: int) -> AbstractContextManager[None]:
        """A context for computing the unit in ``slot``; it comes after the unit's
        load."""
        is_loaded = self._ready[slot]
        is_computed = self._computed[slot]
        return self._stage(self.compute, [is_loaded], is_computed)

    def wait_computed(self, slot: int) -> None:
        """Hold the host until the unit in ``slot`` is computed."""
        self._computed[slot].synchronize()

    def store_stage(self, slot: int) -> AbstractContextManager[None]:
        """A context for storing the unit in ``slot``; it comes after the unit's
        compute."""
        self._notify(wait=False)
        return self._stage(
            self.down,
            [self._computed[slot]],
            self._stored[slot],
            "d2h",
        )

    @contextmanager
    def _stage(
        self, stream: Any, after: Sequence[Any], done: Any, timed: str | None = None
    ) -> Iterator[None]:
        """A context that runs on ``stream`` after some events, and records ``done`` at
        its end."""
        for event in after:
            stream.wait_event(event)
        failed = True
        clock = nullcontext() if timed is None else self._clock.timed(timed)
        try:
            with self.on(stream), clock:
                try:
                    yield
                    failed = False
                finally:
                    self.issue(stream, given_up=failed)
        finally:
            if done is not None:
                done.record(stream)

    def load(
        self, slot: torch.Tensor, far: torch.Tensor, pieces: Sequence[Rows]
    ) -> None:
        """Copy rows into a slot, within a load stage.

        Args:
            slot: a field of the slot, (*entries, heads, n, width); has each piece from
                ``local`` on.
            far: (*entries, heads, N, width), outside of the slot; each piece is its
                rows [start, stop).
            pieces: the rows.
        """
        self.loaded_bytes += self.move(slot, far, pieces, up=True)

    def store(
        self, slot: torch.Tensor, far: torch.Tensor, pieces: Sequence[Rows]
    ) -> None:
        """Copy rows out of a slot, within a store stage, as ``load`` copies them in."""
        self.stored_bytes += self.move(slot, far, pieces, up=False)

    def move(
        self, slot: torch.Tensor, far: torch.Tensor, pieces: Sequence[Rows], *, up: bool
    ) -> int:
        """Copy rows into a slot (``up``) or out of it; returns how many bytes that
        is."""
        n_bytes = 0
        for piece in pieces:
            near_rows = rows_in_slot(slot, piece)
            far_rows = far[..., piece.start : piece.stop, :]
            if up:
                self.copy(near_rows, far_rows)
            else:
                self.copy(far_rows, near_rows)
            n_bytes += near_rows.nbytes
        return n_bytes

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy rows (*entries, heads, n, width) on the stream of the present stage."""
        target.copy_(source)

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that after the stages given so far nothing is copied from or to
        ``tensors``: parts of what was loaded from and stored to, each named
        once."""

    def finish(self, *, wait: bool) -> None:
        """Let all later work come after all stages; with ``wait`` hold the host until
        they are done."""
        self.compute.wait_stream(self.up)
        self.compute.wait_stream(self.down)
        if wait:
            self._notify(wait=True)
            self.compute.synchronize()

    def when_stored(self, notify: Callable[[], None]) -> None:
        """Call ``notify`` once the results of all store stages so far are in their
        place: at a later store stage, or in ``finish``.

        A copy that was issued has not been made yet, and may wait in a buffer after it
        was made. A host that runs ahead of the device comes to know of copies in
        ``finish``, where it waits for one after the other.
        """
        stored = self._event()
        stored.record(self.down)
        self._notices.append((stored, notify))

    def _notify(self, *, wait: bool) -> None:
        """Make the calls whose stores have been made; with ``wait`` hold the host until
        they have."""
        while self._notices:
            stored, notify = self._notices[0]
            if wait:
                stored.synchronize()
            if not stored.query():
                return
            self._write_results()
            self._notices.popleft()
            notify()

    def _write_results(self) -> None:
        """Write the results that have left the device, and wait in buffers, to their
        place. The host waits for the store stages so far."""


def rows_in_slot(slot: torch.Tensor, piece: Rows) -> torch.Tensor:
    """The rows of ``piece`` in a slot's field (*entries, heads, n, width)."""
    stop = piece.local + piece.length
    return slot[..., piece.local : stop, :]
