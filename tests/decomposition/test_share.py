"""The share of a call that a mask keeps, for predictions: near what it is, and never nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition.pairs import Pairs, window_verdict
from quorum_attention.decomposition.share import kept_share


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2000, 100_000), part=st.floats(0.02, 1.0), is_causal=st.booleans())
def test_a_window(n: int, part: float, is_causal: bool) -> None:
    left = int(part * n)
    found = kept_share(Pairs(n, n, is_causal, window_verdict(left, 0 if is_causal else left)))
    outside = max(0, n - left - 1)
    exact = 1.0 - outside * (outside + 1) / (n * (n + 1 if is_causal else n))
    # Half of the border counts, a block wide on both sides; of causal pairs there are half as many.
    assert found == pytest.approx(exact, abs=max(128, n / 1024) / n * (1 + is_causal))


def test_without_a_mask_and_with_a_known_share() -> None:
    assert kept_share(Pairs(1000, 1000, True)) == 1.0
    everything = window_verdict(-1, -1)
    assert kept_share(Pairs(1000, 1000, True, everything)) == 1.0
    assert kept_share(Pairs(0, 9, False, everything)) == 1.0
    assert kept_share(Pairs(1000, 1000, True, everything, share=0.25)) == 0.25
    # Divided by: never 0.
    assert 0 < kept_share(Pairs(1000, 1000, True, everything, share=0.0)) < 1e-3
    assert 0 < kept_share(Pairs(10, 1 << 20, False, window_verdict(0, 0))) < 1e-2
