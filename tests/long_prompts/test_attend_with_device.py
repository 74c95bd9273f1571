"""How attention is shared between a device, the bus and the cores, without a GPU.

A CPU stands in for the device: what is in host memory counts as elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quorum_attention.long_prompts import attend
from quorum_attention.long_prompts.host_reader import Piece
from quorum_attention.long_prompts.places import Place
from quorum_attention.long_prompts.segments import Segment

HEADS, KEY_HEADS, DIM = 4, 2, 16


class FakeSharing:
    """Gives the bus the first tokens of each piece, and notes what is asked for."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    @contextmanager
    def of_one_call(self) -> Iterator[FakeSharing]:
        yield self

    def split(self, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
        by_bus = [piece.first(30) for piece in pieces]
        return by_bus, [piece.behind(30) for piece in pieces]

    def arrived(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        self.notes.append("arrived")
        return pieces

    def copy_ahead(self, next_segments: Sequence[Segment]) -> None:
        self.notes.append("copy_ahead")

    def adjust(self, pieces: Any) -> None:
        self.notes.append("adjust")


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(attend, "_can_read_host_memory", lambda call, piece: True)
    monkeypatch.setattr(attend, "copy_segment", lambda memory, segment: segment)


def attend_by_places(
    n_queries: int, places: Sequence[Place], sharing: FakeSharing | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``_attend_with_device`` computes, and the equations' result in float64."""
    keys = torch.randn(1, KEY_HEADS, 100 * len(places), DIM)
    values = torch.randn_like(keys)
    query = torch.randn(1, HEADS, n_queries, DIM)
    pieces = []
    for number, place in enumerate(places):
        tokens = slice(100 * number, 100 * number + 100)
        segment = Segment(keys[:, :, tokens], values[:, :, tokens], place)
        pieces.append(Piece(tokens.start, segment))
    mask = attend.KeyMask(n_queries, keys.shape[2])
    call = attend._SegmentedCall(query, mask, attend.ScoreScaling(DIM**-0.5))
    state = attend.RunningStatistics(query, DIM)
    attend._attend_with_device(call, pieces, state, sharing, ())  # type: ignore[arg-type]
    group = HEADS // KEY_HEADS
    wide_keys = keys.double().repeat_interleave(group, 1)
    wide_values = values.double().repeat_interleave(group, 1)
    scores = query.double() @ wide_keys.mT * DIM**-0.5
    positions = torch.arange(keys.shape[2])
    hidden = positions > positions[-n_queries:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return state.results()[0], weights @ wide_values


@pytest.mark.parametrize("n_queries", [1, 5, 40, 90])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("n_on_device", [0, 1])
def test_all_keys_are_attended_over_once(
    n_queries: int,
    is_shared: bool,
    n_on_device: int,
    fake_device: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few rows are shared; many have everything copied. Nothing may be on the
    device."""
    places = [Place.DEVICE] * n_on_device + [Place.HOST, Place.FILE]
    on_device = iter([place is Place.DEVICE for place in places] * 2)
    monkeypatch.setattr(attend, "on_host", lambda device: not next(on_device))
    sharing = FakeSharing() if is_shared else None
    out, expected = attend_by_places(n_queries, places, sharing)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    rows_are_few = n_queries * HEADS // KEY_HEADS <= attend._MAX_CORE_ROWS
    if sharing is not None:
        notes = ["arrived", "copy_ahead", "adjust"] if rows_are_few else []
        assert sharing.notes == notes


def test_the_kernel_that_merges_parts_is_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first token after a prompt waited for it: one part alone is not merged."""
    n_parts = []

    def decode(
        query: torch.Tensor, parts: Sequence[object], *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n_parts.append(len(parts))
        return torch.zeros(query.shape), torch.zeros(query.shape[:3])

    monkeypatch.setattr(attend, "begin_to_compile", lambda dtype: None)
    monkeypatch.setattr(attend, "can_decode", lambda *_: True)
    monkeypatch.setattr(attend, "decode", decode)
    query = torch.randn(1, HEADS, 1, DIM)
    attend.compile_kernels(query, torch.randn(1, KEY_HEADS, 1, DIM))
    assert set(n_parts) == {2}
    assert len(n_parts) == 4, (
        "statistics of two calls are merged, for one token or many"
    )
