"""Simulated passes end when their parts' seconds say, and lost devices cost what they had begun."""

from __future__ import annotations

from itertools import pairwise

import pytest

from quorum_attention.pool.parts import Part, Sizes
from quorum_attention.pool.simulate import simulate

SIZES = Sizes(1, 8, 8, 1 << 20, 1 << 20, True)
PAIRS = 8 * ((1 << 20) * ((1 << 20) + 1) // 2)


def seconds_at(*speeds: float):  # type: ignore[no-untyped-def]
    return lambda device, part: part.pairs(SIZES) / PAIRS / speeds[device]


def test_one_device_takes_the_sum() -> None:
    assert simulate(SIZES, ["a"], seconds_at(0.5)).seconds == pytest.approx(2.0)


@pytest.mark.parametrize("sure", [False, True])
def test_orders_cost_something(sure: bool) -> None:
    """Each: so devices that are surely alike, which take theirs at once, wait the least."""
    report = simulate(
        SIZES, ["a", "a"], seconds_at(1.0, 1.0), sure=sure, order_seconds=0.01
    )  # fmt: skip
    assert report.seconds == pytest.approx(0.5 + (0.01 if sure else 0.02), abs=1e-4)


@pytest.mark.parametrize("devices", [2, 3, 5, 8])
def test_devices_that_are_alike(devices: int) -> None:
    report = simulate(SIZES, ["a"] * devices, seconds_at(*[1.0] * devices))
    assert report.seconds == pytest.approx(1 / devices, rel=0.02)
    assert sorted(one.index for one in report.ran) == list(range(report.parts))


def test_nobody_runs_two_parts_at_once() -> None:
    report = simulate(SIZES, ["a", "b", "c"], seconds_at(1.0, 0.5, 0.3))
    for device in range(3):
        mine = sorted((one.start, one.stop) for one in report.ran if one.device == device)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(mine))


def test_half_the_speed_is_within_a_tenth_of_the_ideal_split() -> None:
    report = simulate(SIZES, ["a", "b"], seconds_at(1.0, 0.5))
    assert report.seconds <= 1.10 / 1.5


@pytest.mark.parametrize("at", [0.0, 0.05, 0.2, 0.33])
def test_a_lost_device_costs_the_part_it_had(at: float) -> None:
    report = simulate(SIZES, ["a"] * 3, seconds_at(1.0, 1.0, 1.0), lost={1: at})
    assert sorted(one.index for one in report.ran) == list(range(report.parts))
    assert all(one.stop <= at + 1e-12 for one in report.ran if one.device == 1)
    # What it did until then, and two devices for the rest; at most one part runs twice.
    largest = max(one.stop - one.start for one in report.ran)
    ideal = 1 / 3 if at >= 1 / 3 else at + (1 - 3 * at) / 2
    assert report.seconds <= ideal + 1.5 * largest


def test_all_are_lost() -> None:
    with pytest.raises(RuntimeError, match="no device is left"):
        simulate(SIZES, ["a", "a"], seconds_at(1.0, 1.0), lost={0: 0.1, 1: 0.2})


def test_parts_are_those_of_a_pool() -> None:
    seen: list[Part] = []

    def seconds(device: int, part: Part) -> float:
        seen.append(part)
        return 1.0

    simulate(SIZES, ["a", "a"], seconds)
    assert sum(part.pairs(SIZES) for part in seen) == PAIRS
