"""What parts are predicted to take goes by the rates of their device and their share of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quorum_attention as qa
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.planner.machine import assumed
from quorum_attention.pool.parts import Part, Sizes
from quorum_attention.pool.predict import predicted
from quorum_attention.pool.simulate import simulate

SIZES = Sizes(1, 8, 4, 1 << 20, 1 << 20, True)
TWO = Part(0, Interval(2, 6), Interval(0, 1 << 20), True)
H200 = assumed("cuda", torch.float16, 64)
CALL = {"head_dim": 64, "dtype": torch.float16, "budget": "128MiB", "device": "cuda"}


@pytest.mark.parametrize("backward", [False, True])
def test_the_rates_that_plans_are_made_by(backward: bool) -> None:
    made = qa.plan(1 << 20, heads=4, kv_heads=2, is_causal=True, backward=backward, **CALL)
    seconds = predicted(SIZES, [None, H200], backward=backward, **CALL)
    assert seconds(0, TWO) == made.predicted_seconds
    assert seconds(1, TWO) == pytest.approx(made.predicted_seconds)


def test_a_slow_link_and_a_slow_device() -> None:
    links = [replace(H200, up_bytes_per_second=r, down_bytes_per_second=r) for r in (50e9, 14e9)]
    slow = replace(H200, flops=H200.flops / 2)
    seconds = predicted(SIZES, [*links, slow], backward=False, **CALL)
    # Kernels hide all but the first and the last copies.
    assert 1.01 < seconds(1, TWO) / seconds(0, TWO) < 1.10
    assert 1.8 < seconds(2, TWO) / seconds(0, TWO) < 2.1


def test_parts_of_a_head() -> None:
    seconds = predicted(SIZES, [H200], backward=False, **CALL)
    two = seconds(0, TWO)
    rows = [Interval(0, 1 << 19), Interval(1 << 19, 1 << 20)]
    first, second = (seconds(0, TWO._replace(rows=each, whole=False)) for each in rows)
    assert first + second == pytest.approx(two)
    assert second == pytest.approx(3 * first, rel=1e-3)  # under a causal mask
    one_query_head = TWO._replace(heads=Interval(2, 3), whole=False)
    pair = TWO._replace(heads=Interval(2, 4))
    assert 2 * seconds(0, one_query_head) == pytest.approx(seconds(0, pair), rel=0.05)


def test_a_pass_of_devices_with_unequal_links() -> None:
    links = [replace(H200, up_bytes_per_second=r, down_bytes_per_second=r) for r in (50e9, 5e9)]
    seconds = predicted(SIZES, links, backward=False, **CALL)
    found = simulate(SIZES, ["a", "a"], seconds, sure=True)
    assert found.seconds == pytest.approx(seconds(1, TWO))  # two key/value heads each
