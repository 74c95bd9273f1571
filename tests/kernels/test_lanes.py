"""Calls on several streams: what has to wait for what does, and nothing else; no GPU needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch

from quorum_attention.kernels.lanes import Lanes


class Stream:
    """Notes what is enqueued; ``before`` is all that has ended when the next begins."""

    current: ClassVar[list[Stream]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: set[str] = set()

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before

    def wait_event(self, event: Event) -> None:
        self.before |= event.before

    def run(self, what: str) -> set[str]:
        """Enqueues ``what``; all that is sure to have ended before it begins."""
        known = set(self.before)
        self.before.add(what)
        return known


class Event:
    before: set[str]

    def record(self, stream: Stream) -> None:
        self.before = set(stream.before)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Stream:
    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        Stream.current.append(stream)
        yield
        Stream.current.pop()

    first = Stream(torch.device("cuda", 0))
    monkeypatch.setattr(Stream, "current", [first])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.current[-1])
    return first


def run(lanes: Lanes, calls: int, name: str = "") -> list[tuple[set[str], set[str]]]:
    """A task of so many calls; what each call, and each merge, follows."""
    found = []
    with lanes.task():
        for number in range(calls):
            with lanes.call(number):
                called = Stream.current[-1].run(f"{name}call {number}")
                with lanes.merge(number):
                    merged = Stream.current[-1].run(f"{name}merge {number}")
            found.append((called, merged))
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_merges_follow_each_other_and_calls_do_not(main: Stream, count: int) -> None:
    main.run("loaded")
    for number, (called, merged) in enumerate(run(Lanes(torch.device("cuda", 0), count), 7)):
        assert "loaded" in called
        assert merged >= {f"merge {n}" for n in range(number)} | {f"call {number}"}
        beside = {f"{what} {n}" for what in ("call", "merge") for n in range(number)}
        beside -= {f"call {n}" for n in range(max(0, number - count + 1))}
        beside -= {f"merge {n}" for n in range(max(0, number - count + 1))}
        assert not called & beside, "waits for what could run at the same time"


def test_what_comes_after_a_task_follows_all_of_it(main: Stream) -> None:
    lanes = Lanes(torch.device("cuda", 0), 2)
    run(lanes, 3, "first ")
    after = main.run("stored")
    assert after == {f"first {what} {n}" for what in ("call", "merge") for n in range(3)}
    # No merge of another task is waited for: the next one follows the main stream.
    (called, _), *_ = run(lanes, 1, "second ")
    assert called >= after


def test_a_task_that_fails_is_followed_too(main: Stream) -> None:
    lanes = Lanes(torch.device("cuda", 0), 2)

    def failing() -> None:
        with lanes.task(), lanes.call(1):
            Stream.current[-1].run("failed call")
            raise torch.OutOfMemoryError("sabotaged")

    with pytest.raises(torch.OutOfMemoryError):
        failing()
    Stream.current[1:] = []
    assert "failed call" in main.run("evicted")
