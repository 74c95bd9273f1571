"""Clocks: seconds by stage, and that a device's own are read only once they have passed."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.execution.device.cuda import CudaClock
from quorum_attention.execution.device.mover import STAGES, HostClock


def test_sums_by_stage() -> None:
    clock = HostClock()
    assert clock.seconds() == dict.fromkeys(STAGES, 0.0)
    for stage, seconds in (("h2d", 1.0), ("h2d", 2.0), ("compute", 5.0), ("merge", 0.5)):
        clock.add(stage, seconds)
    # Merges happen inside the kernel calls.
    assert clock.seconds() == {**dict.fromkeys(STAGES, 0.0), "h2d": 3, "compute": 4.5, "merge": 0.5}


class Event:
    """A CUDA event of a stream on which every millisecond something happens."""

    recorded = 0
    happened = 0  # up to which event
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.number = Event.recorded

    def query(self) -> bool:
        return self.number <= Event.happened

    def synchronize(self) -> None:
        Event.waits += not self.query()
        Event.happened = max(Event.happened, self.number)

    def elapsed_time(self, other: Event) -> float:
        assert other.query(), "read before it has happened"
        return float(other.number - self.number)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("recorded", "happened", "waits"):
        monkeypatch.setattr(Event, name, 0)
    return Event


def test_events_are_read_at_the_end(events: type[Event]) -> None:
    clock = CudaClock()
    for _ in range(3):
        with clock.timed("compute"), clock.timed("merge"):
            pass
    assert events.waits == 0
    # Outside to outside three milliseconds, inside one.
    assert clock.seconds()["compute"] == pytest.approx(3 * 2e-3)
    assert clock.seconds()["merge"] == pytest.approx(3 * 1e-3)
