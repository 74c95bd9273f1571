"""Moves rows between tensors and slots, keeps the stages of units in order, and measures them.

A unit goes through three stages: *load* (inputs and travelling state into a slot), *compute*, and
*store* (state and results out of the slot). On a device with streams each stage has its own stream,
so the next unit loads and the last unit stores while a unit computes. On the CPU the stages follow
one another.

Seconds are measured on the device that spends them, by the paper's six stages: *gather* (state
handed on between slots, and scaling), *h2d* (copies from the host to the device), *compute* (the
inner kernel), *merge*, *d2h* (copies back), and *scatter* (finished rows into their final dtype).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from quorum_attention.decomposition import Rows

STAGES = ("gather", "h2d", "compute", "merge", "d2h", "scatter")


class Clock(Protocol):
    """Adds up seconds by stage."""

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """A context: what runs on the current stream in it counts as ``stage``."""
        ...

    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far, after all work is done; ``compute`` is without its merges."""
        ...


class NoClock:
    """A clock that measures nothing."""

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return nullcontext()

    def seconds(self) -> dict[str, float]:
        """No seconds for any stage."""
        return {}


class HostClock:
    """Measures the host's time, for devices whose work is done when a call returns."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, stage: str, seconds: float) -> None:
        """Count ``seconds`` more for ``stage``."""
        self._sums[stage] = self._sums.get(stage, 0.0) + seconds

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """A context: the time spent in it counts as ``stage``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - started)

    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far, for all stages; ``compute`` is without its merges."""
        net = {stage: self._sums.get(stage, 0.0) for stage in STAGES}
        net["compute"] = max(0.0, net["compute"] - net["merge"])
        return net


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

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that after the stages given so far nothing is copied from or to ``tensors``: heads
        of what was loaded from and stored to, each named once."""

    def finish(self, *, wait: bool) -> None:
        """Let all later work come after all stages; with ``wait`` hold the host until they are
        done."""


def local_part(slot: torch.Tensor, piece: Rows) -> torch.Tensor:
    """The rows of ``piece`` in a slot's field (heads, n, width)."""
    return slot[:, piece.local : piece.local + piece.stop - piece.start]


class Event(Protocol):
    """A point in a stream's work, as torch.cuda.Event."""

    def record(self, stream: Any) -> None:
        """Set the point: after all work that ``stream`` was given so far."""
        ...

    def synchronize(self) -> None:
        """Hold the host until the point is reached; do nothing if none was recorded."""
        ...


class Stream(Protocol):
    """Does the work it is given in order, as torch.cuda.Stream."""

    def wait_event(self, event: Any) -> None:
        """Let later work wait for the event's point; do nothing if none was recorded."""
        ...

    def wait_stream(self, stream: Any) -> None:
        """Let later work wait for all work that ``stream`` was given so far."""
        ...

    def synchronize(self) -> None:
        """Hold the host until all its work is done."""
        ...


class StreamMover(Mover):
    """Keeps the stages of units in order on three streams; subclasses say how rows are copied.

    Attributes:
        up, compute, down: the streams of loads, of compute (the caller's stream), and of stores.
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
        # Work given before this call may still write the inputs or use the arena's memory.
        self.up.wait_stream(self.compute)
        self.down.wait_stream(self.compute)
        self._ready, self._computed, self._stored, self._handed_on = (
            [event() for _ in range(n_slots)] for _ in range(4)
        )

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which what is launched goes to ``stream``."""
        raise NotImplementedError

    def issue(self, stream: Any, *, given_up: bool) -> None:
        """Give ``stream`` the copies that its stage noted; with ``given_up`` forget them."""

    def input_stage(self, slot: int) -> AbstractContextManager[Any]:
        """See ``Mover.input_stage``; what the next unit carries over has been read by then too."""
        after = [self._stored[slot], self._handed_on[slot]]
        return _Stage(self, self.up, after, None, self._clock.timed("h2d"))

    def state_stage(self, slot: int, after_store_of: int) -> AbstractContextManager[Any]:
        """See ``Mover.state_stage``."""
        after = [self._stored[after_store_of]]
        return _Stage(self, self.up, after, self._ready[slot], self._clock.timed("h2d"))

    def carried_from(self, slot: int) -> None:
        """See ``Mover.carried_from``."""
        self._handed_on[slot].record(self.compute)

    def compute_stage(self, slot: int) -> AbstractContextManager[Any]:
        """See ``Mover.compute_stage``."""
        return _Stage(self, self.compute, [self._ready[slot]], self._computed[slot], None)

    def wait_computed(self, slot: int) -> None:
        """See ``Mover.wait_computed``."""
        self._computed[slot].synchronize()

    def store_stage(self, slot: int) -> AbstractContextManager[Any]:
        """See ``Mover.store_stage``."""
        after, timed = [self._computed[slot]], self._clock.timed("d2h")
        return _Stage(self, self.down, after, self._stored[slot], timed)

    def finish(self, *, wait: bool) -> None:
        """Let the compute stream wait for the others; with ``wait`` hold the host for it."""
        self.compute.wait_stream(self.up)
        self.compute.wait_stream(self.down)
        if wait:
            self.compute.synchronize()


class _Stage:
    """A context that runs on ``stream`` after some events, and records ``done`` at its end."""

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
