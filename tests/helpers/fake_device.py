"""A fake device with streams, for tests without a GPU.

It works in host memory. A copy happens as late as possible: when something waits for
it. So results are wrong if the engine does not wait for all that it has to. Durations
and failures are made up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.clock import Clock, HostClock
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import PageLocks


class FakeStream:
    """A stream that does its pieces of work in order, but only when something waits for
    them.

    ``now``: the made-up time at which all its work so far would be done, in seconds.
    ``issued``: pieces of work that it was given so far.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.issued = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def give(self, work: Callable[[], None], seconds: float = 0.0) -> None:
        """Add ``work``, which takes ``seconds``, after all earlier work."""
        self._waiting.append(work)
        self.issued += 1
        self.now += seconds

    @property
    def n_done(self) -> int:
        """Pieces of work that are done."""
        return self.issued - len(self._waiting)

    def reach(self, position: int) -> None:
        while self.issued - len(self._waiting) < position:
            self._waiting.popleft()()

    def wait_event(self, event: FakeEvent) -> None:
        if event.stream is not None:
            self.now = max(self.now, event.at)
            self.give(partial(event.stream.reach, event.position))

    def wait_stream(self, stream: FakeStream) -> None:
        event = FakeEvent()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.reach(self.issued)


class FakeEvent:
    """A position in a stream's work, and the made-up time at which it would be
    reached."""

    def __init__(self) -> None:
        self.stream: FakeStream | None = None
        self.position, self.at = 0, 0.0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.position, self.at = stream, stream.issued, stream.now

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.reach(self.position)

    def query(self) -> bool:
        """Whether it has happened."""
        return self.stream is None or self.stream.n_done >= self.position


class FakeDevice(Backend):
    """Takes the place of the CPU within a ``with`` block.

    The planner gets the CPU's answers from it, so that what the planner caches stays
    right.

    Attributes:
        memory_bytes: an arena larger than this fails; may be changed at any time.
        bytes_per_second: rate of copies in each direction.
        unit_seconds: duration of computing a unit, in calls that have a report.
        failing: is given the number of a unit, counted from 1; whether it runs out of
            memory.
        computed: units that were begun so far.
        seconds: made-up duration of everything so far.
        running: the stream that is current.
    """

    def __init__(
        self,
        memory_bytes: int = 1 << 40,
        *,
        bytes_per_second: float = 1e9,
        unit_seconds: float = 1e-3,
        failing: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.bytes_per_second = bytes_per_second
        self.unit_seconds = unit_seconds
        self.failing = failing
        self.computed = 0
        self.seconds = 0.0
        self.running = FakeStream()

    def __enter__(self) -> FakeDevice:
        self._real = BACKENDS[self.kind]
        BACKENDS[self.kind] = self
        return self

    def __exit__(self, *exc: object) -> None:
        BACKENDS[self.kind] = self._real

    def free_bytes(self, device: torch.device) -> int:
        return self.memory_bytes

    def allocate(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        if n_bytes > self.memory_bytes:
            raise torch.OutOfMemoryError(
                f"{n_bytes} bytes of {self.memory_bytes}, made up"
            )
        return super().allocate(n_bytes, device)

    def clock(self) -> Clock:
        return _FakeClock(self)

    def mover(
        self, device: torch.device, n_slots: int, locks: PageLocks, clock: Clock
    ) -> Mover:
        return FakeMover(self, n_slots, clock)


class FakeMover(Mover):
    """The stages of a device with streams, on fake streams."""

    def __init__(self, device: FakeDevice, n_slots: int, clock: Clock) -> None:
        self._device = device
        self._streams = (FakeStream(), FakeStream(), FakeStream())
        for stream in self._streams:
            stream.now = device.seconds
        super().__init__(clock, n_slots, self._streams, FakeEvent)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """A context with ``stream`` as the current one.

        Compute is not put off: it first does all that its stream waits for, then runs
        at once.
        """
        device, before = self._device, self._device.running
        device.running = stream
        try:
            if stream is self.compute:
                device.computed += 1
                if device.failing(device.computed):
                    raise torch.OutOfMemoryError(f"unit {device.computed}, made up")
                stream.synchronize()
            yield
        finally:
            device.running = before

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        seconds = source.numel() * source.element_size() / self._device.bytes_per_second
        self._device.running.give(lambda: _copy(target, source), seconds)

    def finish(self, *, wait: bool) -> None:
        super().finish(wait=wait)
        self._device.seconds = max(stream.now for stream in self._streams)


def ignore_events(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have fake movers record none of their events that are called ``name``."""
    made = FakeMover.__init__

    class Ignored(FakeEvent):
        def record(self, stream: FakeStream) -> None:
            pass

    def without(
        self: FakeMover, device: FakeDevice, n_slots: int, clock: Clock
    ) -> None:
        made(self, device, n_slots, clock)
        setattr(self, name, [Ignored() for _ in range(n_slots)])

    monkeypatch.setattr(FakeMover, "__init__", without)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


class _FakeClock(HostClock):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        stream = self._device.running
        began = stream.now
        yield
        if stage == "compute":
            stream.now += self._device.unit_seconds
        self.add(stage, stream.now - began)
