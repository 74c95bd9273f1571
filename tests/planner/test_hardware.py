"""Rates of a machine: shares of them behave, and assumed ones are whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.planner.hardware import assumed

KINDS = ["cpu", "cuda"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(0, 1 << 22),
    causal_side=st.sampled_from([0, 1, 1000, 1 << 17]),
    streams=st.integers(1, 3),
)
def test_a_share_is_a_share(kind: str, rows: int, causal_side: int, streams: int) -> None:
    machine = assumed(kind, torch.float16)
    share = machine.share_of_rate(rows, causal_side, streams)
    assert 0 < share <= 1
    # A second call fills what the first leaves idle.
    assert machine.share_of_rate(rows, causal_side, streams + 1) >= share - 1e-12
    # Twice as many whole waves leave no more idle.
    assert machine.share_of_rate(2 * max(1, rows), causal_side, streams) >= share - 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_in_cache_is_as_fast_as_it_gets(kind: str) -> None:
    machine = assumed(kind, torch.float16)
    shares = [machine.cached_share(1 << power) for power in range(40)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert shares[-1] >= 0.75


def test_waves() -> None:
    machine = assumed("cuda", torch.float16, 64)
    whole = machine.share_of_rate(2 * machine.wave_rows)
    assert whole == 1.0
    assert machine.share_of_rate(2 * machine.wave_rows + 128) < 0.72
    assert 0.85 < machine.share_of_rate(2 * machine.wave_rows + 128, streams=2) < 1
    assert machine.share_of_rate(5_000, causal_side=5_000) < machine.share_of_rate(5_000)
