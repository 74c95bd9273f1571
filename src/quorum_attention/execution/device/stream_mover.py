"""Stages on streams of their own, tied by events, so that copies run beside compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.mover import Mover


class Event(Protocol):
    """A point of a stream."""

    def record(self, stream: Any) -> None:
        """It is what ``stream`` has been given so far."""
        ...

    def synchronize(self) -> None:
        """Hold the host until it has been reached, if it was recorded."""
        ...


class Stream(Protocol):
    """Does what it is given in order."""

    def wait_event(self, event: Any) -> None:
        """What follows waits for the event as it was recorded last, if it was."""
        ...

    def wait_stream(self, stream: Any) -> None:
        """What follows waits for what ``stream`` has been given so far."""
        ...

    def synchronize(self) -> None:
        """Hold the host until everything is done."""
        ...


class StreamMover(Mover):
    """The order of stages; how streams copy is a device's own.

    Attributes:
        up, compute, down: the streams.
    """

    def __init__(
        self,
        clock: Clock,
        n_slots: int,
        streams: tuple[Stream, Stream, Stream],
        event: Callable[[], Event],
    ) -> None:
        super().__init__(clock)
        self.up, self.compute, self.down = streams
        # What came before this call (the inputs, the arena's memory) comes first.
        self.up.wait_stream(self.compute)
        self.down.wait_stream(self.compute)
        self._ready, self._computed, self._stored, self._handed_on = (
            [event() for _ in range(n_slots)] for _ in range(4)
        )

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within it, what is launched goes to ``stream``."""
        raise NotImplementedError

    def issue(self, stream: Any, *, given_up: bool) -> None:
        """Give ``stream`` the copies that its stage noted, or forget them."""

    def input_stage(self, slot: int) -> AbstractContextManager[Any]:
        """Upwards, once the slot's previous unit is stored and has handed on."""
        after = [self._stored[slot], self._handed_on[slot]]
        return _Stage(self, self.up, after, None, self._clock.timed("h2d"))

    def state_stage(self, slot: int, after_store_of: int) -> AbstractContextManager[Any]:
        """Upwards, after the inputs and the store that wrote the state last."""
        after = [self._stored[after_store_of]]
        return _Stage(self, self.up, after, self._ready[slot], self._clock.timed("h2d"))

    def carried_from(self, slot: int) -> None:
        """The compute stream has read what ``slot`` hands on."""
        self._handed_on[slot].record(self.compute)

    def compute_stage(self, slot: int) -> AbstractContextManager[Any]:
        """On the caller's stream, once the slot is loaded."""
        return _Stage(self, self.compute, [self._ready[slot]], self._computed[slot], None)

    def wait_computed(self, slot: int) -> None:
        """By its event."""
        self._computed[slot].synchronize()

    def store_stage(self, slot: int) -> AbstractContextManager[Any]:
        """Downwards, once the slot is computed."""
        after, timed = [self._computed[slot]], self._clock.timed("d2h")
        return _Stage(self, self.down, after, self._stored[slot], timed)

    def finish(self, *, wait: bool) -> None:
        """The caller's stream, and with ``wait`` the host, follow both copy streams."""
        self.compute.wait_stream(self.up)
        self.compute.wait_stream(self.down)
        if wait:
            self.compute.synchronize()


class _Stage:
    """Runs its block on a stream, after some events, and records one at the end."""

    def __init__(
        self,
        mover: StreamMover,
        stream: Stream,
        after: list[Event],
        done: Event | None,
        timed: AbstractContextManager[None] | None,
    ) -> None:
        self.mover, self.stream, self.after, self.done = mover, stream, after, done
        self.context = mover.on(stream)
        self.timed = timed

    def __enter__(self) -> None:
        for event in self.after:
            self.stream.wait_event(event)
        self.context.__enter__()
        if self.timed is not None:
            self.timed.__enter__()

    def __exit__(self, *exc: Any) -> None:
        try:
            self.mover.issue(self.stream, given_up=exc[0] is not None)
        finally:
            if self.timed is not None:
                self.timed.__exit__(*exc)
            self.context.__exit__(*exc)
        if self.done is not None:
            self.done.record(self.stream)
