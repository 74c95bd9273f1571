"""The shares of the bus and the cores in keys in host memory, without a GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quorum_attention.long_prompts import attend, host_sharing
from quorum_attention.long_prompts.host_reader import Piece
from quorum_attention.long_prompts.places import Place
from quorum_attention.long_prompts.segments import Segment


class FakeEvent:
    """An event that is what ``is_done`` says."""

    is_done = True

    def query(self) -> bool:
        return self.is_done


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> host_sharing.HostSharing:
    reader = SimpleNamespace(was_idle=False, arrived=lambda piece: [piece])
    monkeypatch.setattr(host_sharing, "HostReader", lambda memory: reader)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    return host_sharing.HostSharing(torch.empty(0, dtype=torch.uint8))


def piece_of(start: int, n_tokens: int, place: Place = Place.HOST) -> Piece:
    keys = torch.zeros(1, 2, n_tokens, 16)
    return Piece(start, Segment(keys, keys, place))


# Enough tokens to be shared.
TEXT = [piece_of(0, 50_000)]


def test_whoever_ends_first_gets_more(sharing: host_sharing.HostSharing) -> None:
    """The share moves until both end together, and stays a share."""
    for is_done, last in ((True, 1.0), (False, 0.0)):
        FakeEvent.is_done = is_done
        shares = []
        for _ in range(200):
            sharing.adjust(TEXT)
            shares.append(sharing.bus_share)
        assert shares == sorted(shares, reverse=not is_done)
        assert shares[-1] == last


def test_a_bus_that_rested_gets_more(sharing: host_sharing.HostSharing) -> None:
    """The host launches nothing while the cores attend: they may get nothing to do."""
    FakeEvent.is_done = False
    reader: Any = sharing._reader
    reader.was_idle = True
    for _ in range(50):
        sharing.arrived(TEXT)
        sharing.adjust(TEXT)
    assert sharing.bus_share == 1.0
    reader.was_idle = False
    sharing.arrived(TEXT)
    sharing.adjust(TEXT)
    assert sharing.bus_share < 1.0


def test_a_bus_that_had_no_more_memory_gets_no_more(
    sharing: host_sharing.HostSharing,
) -> None:
    """It rested because the buffer for copies was full: with a larger share it would
    rest as long, and the cores would too."""
    FakeEvent.is_done = False
    reader: Any = sharing._reader
    reader.was_idle = True
    reader.arrived = lambda piece: [piece.first(100), piece.behind(100)]
    two_segments = [piece_of(0, 50_000), piece_of(50_000, 50_000)]
    for pieces in (TEXT, two_segments):
        before = sharing.bus_share
        sharing.arrived(pieces)
        sharing.adjust(pieces)
        assert sharing.bus_share < before


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_each_token_is_read_once(
    sharing: host_sharing.HostSharing, share: float
) -> None:
    """The bus gets the first tokens of page-locked memory, the cores all others."""
    sharing.bus_share = share
    pieces = [
        piece_of(0, 50_000),
        piece_of(50_000, 700, Place.FILE),
        piece_of(50_700, 1001),
    ]
    by_bus, by_cores = sharing.split(pieces)
    tokens: list[int] = []
    for part in (*by_bus, *by_cores):
        tokens += range(part.start, part.start + part.segment.n_tokens)
    assert sorted(tokens) == list(range(51_701))
    assert all(part.segment.place is Place.HOST for part in by_bus)
    n_by_bus = sum(part.segment.n_tokens for part in by_bus)
    assert n_by_bus <= share * 51_701
    assert n_by_bus > min(share * 51_701, 51_000 * share) - 2 * 128 - 1


def test_few_tokens_are_the_bus_alone(sharing: host_sharing.HostSharing) -> None:
    """Each layer of a forked cache has its question's tokens in host memory. With the
    cores a token of its answer took twice as long."""
    sharing.bus_share = 0.5
    by_bus, by_cores = sharing.split([piece_of(0, 1000)])
    assert [part.segment.n_tokens for part in by_bus] == [1000]
    assert not by_cores
    sharing.adjust([piece_of(0, 1000)])
    assert sharing.bus_share == 0.5
    _, by_cores = sharing.split(TEXT)
    assert by_cores


def test_a_query_does_not_wait_for_copies_made_ahead(
    sharing: host_sharing.HostSharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream waits for copies where they are asked for. The cores, which need none
    of them, had waited a millisecond in each layer."""
    steps: list[str] = []

    def note(step: str, result: Any = None) -> Any:
        return lambda *args: steps.append(step) or result

    event = SimpleNamespace(synchronize=note("query is there"))
    stream = SimpleNamespace(record_event=note("query is on its way", event))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(attend, "_can_read_host_memory", lambda call, piece: True)
    monkeypatch.setattr(attend, "_attend_on_device", note("device attends"))
    monkeypatch.setattr(attend, "_attend_on_cores", note("cores attend", (1, 2)))
    monkeypatch.setattr(sharing, "arrived", note("stream waits for copies", []))
    monkeypatch.setattr(sharing, "copy_ahead", note("copies of the next layer"))
    call: Any = SimpleNamespace(to_host=note("query"), query=torch.zeros(1))
    state: Any = SimpleNamespace(merge=note("merge"))
    attend._attend_with_cores(call, [], TEXT, state, sharing, [])
    assert steps == [
        "query",
        "query is on its way",
        "stream waits for copies",
        "device attends",
        "copies of the next layer",
        "query is there",
        "cores attend",
        "merge",
    ]


def test_one_call_at_a_time_has_the_copies(sharing: host_sharing.HostSharing) -> None:
    """Forks of a cache may be asked in several threads: a second one would have copied
    over what the first one's attention was about to read."""
    seen: list[Any] = []

    def ask() -> None:
        with sharing.of_one_call() as shared:
            seen.append(shared)

    def ask_in_a_thread() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    with sharing.of_one_call() as shared:
        assert shared is sharing
        ask_in_a_thread()
    ask_in_a_thread()
    assert seen == [None, sharing]
