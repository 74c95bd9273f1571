"""Lanes: calls take turns on streams, merges follow each other, and the caller's stream both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from quorum_attention.kernels.protocol import Lanes

log: list[str] = []


class Stream:
    made = 0

    def __init__(self, device: object) -> None:
        self.name = f"lane {Stream.made}" if device != "main" else "main"
        Stream.made += device != "main"

    def wait_stream(self, other: Stream) -> None:
        log.append(f"{self.name} after {other.name}")

    def wait_event(self, event: Event) -> None:
        log.append(f"{self.name} after merge {event.number}")


class Event:
    merges = 0
    number = 0

    def record(self, stream: Stream) -> None:
        Event.merges += 1
        self.number = Event.merges
        log.append(f"merge {self.number} on {stream.name}")


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Lanes:
    log.clear()
    monkeypatch.setattr(Stream, "made", 0)
    monkeypatch.setattr(Event, "merges", 0)
    main = Stream("main")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"call on {stream.name}")
        yield

    for name, fake in {
        "Stream": Stream, "Event": Event, "stream": on, "current_stream": lambda: main,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    return Lanes(torch.device("cuda", 0), 2)


def test_a_task_of_three_calls(lanes: Lanes) -> None:
    with lanes.task():
        for number in range(3):
            with lanes.call(number), lanes.merge(number):
                pass
    assert log == [
        "lane 0 after main", "lane 1 after main",
        "call on lane 0", "merge 1 on lane 0",
        "call on lane 1", "lane 1 after merge 1", "merge 2 on lane 1",
        "call on lane 0", "lane 0 after merge 2", "merge 3 on lane 0",
        "main after lane 0", "main after lane 1",
    ]  # fmt: skip


def test_the_caller_follows_a_task_that_failed_too(lanes: Lanes) -> None:
    """What is in flight must not outlive the memory it works in."""
    with pytest.raises(ZeroDivisionError), lanes.task():
        raise ZeroDivisionError
    assert log[-2:] == ["main after lane 0", "main after lane 1"]
