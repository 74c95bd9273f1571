"""Devices that are alike do the same parts, in orders of the same sizes, from the first call on."""

from __future__ import annotations

import random
from functools import partial

import pytest

from quorum_attention.execution.control.events import UnitDone
from quorum_attention.execution.control.machine import Limits, Machine
from quorum_attention.pool.dispatch import Dispatcher
from quorum_attention.pool.parts import Part, Sizes, homes_of, joined, parts_of
from quorum_attention.pool.simulate import simulate


def orders(
    sizes: Sizes, speeds: list[float], paces: dict[int, float], usual: float
) -> dict[int, list[tuple[Part, Part]]]:
    """What each device computed in a pass, and what was near it."""
    parts = parts_of(sizes, len(speeds))
    devices = range(len(speeds))
    machine = Machine(parts, AssertionError, Limits(0, 0), dict.fromkeys(devices, 1))
    dispatch = Dispatcher(
        machine, lambda part: part.pairs(sizes), partial(joined, sizes), paces, True, True,
        timed=bool(paces), homes=homes_of(sizes, parts, devices),
        usual=dict.fromkeys(devices, usual),
    )  # fmt: skip
    found: dict[int, list[tuple[Part, Part]]] = {device: [] for device in devices}
    ends: dict[int, float] = {}
    now = 0.0
    while not machine.finished:
        for device in dispatch.idle():
            behind = dispatch.behind(device, now)
            if behind is not None:
                dispatch.withdrawn(behind)
            dispatch.take(device, now)
        for device, order in dispatch.orders.items():
            if device not in ends:
                ends[device] = now + order.pairs * usual / speeds[device]
                found[device].append((order.part, order.near))
            dispatch.ahead(device, now)
        device = min(ends, key=lambda n: ends[n])
        now = ends.pop(device)
        for unit in dispatch.done(device, now).units:
            machine.on(UnitDone(device, unit, ()))
        dispatch.go_on(device, now)
    return found


@pytest.mark.parametrize("seconds", [3.0, 40.0])
@pytest.mark.parametrize(("heads", "devices"), [(8, 2), (4, 2), (3, 2), (64, 2), (33, 3), (9, 8)])
def test_the_same_from_call_to_call(heads: int, devices: int, seconds: float) -> None:
    """Though nothing is known of them in the first call, and a little more in each later one."""
    sizes = Sizes(1, heads, heads, 1 << 20, 1 << 20, True)
    pairs = sum(part.pairs(sizes) for part in parts_of(sizes, 1))
    draw, usual = random.Random(heads), seconds * devices / pairs
    first = orders(sizes, [1.0] * devices, {}, usual)
    for _ in range(4):
        speeds = [draw.uniform(0.98, 1.02) for _ in range(devices)]
        paces = {n: usual * draw.uniform(0.95, 1.05) for n in range(devices)}
        assert orders(sizes, speeds, paces, usual) == first
    for mine in first.values():
        whole = [part.heads.length for part, _ in mine if part.whole]
        # Of equal lengths, as far as parts are not longer.
        assert heads == 64 or max(whole) - min(whole) <= 1
        # The memory of all whole heads is locked with the first ones.
        near = next(near for part, near in mine if part.whole)
        assert near.heads.length == sum(whole)


@pytest.mark.parametrize("sure", [False, True])
@pytest.mark.parametrize(("heads", "share", "devices"), [
    (3, 1, 2), (5, 1, 2), (5, 1, 3), (7, 1, 4), (9, 1, 8), (1, 1, 5), (3, 4, 2), (1, 6, 4),
])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_no_device_is_idle_in_the_last_round(
    heads: int, share: int, devices: int, causal: bool, sure: bool
) -> None:
    """Key/value heads that do not divide among the devices, which are alike."""
    sizes = Sizes(1, heads * share, heads, 1 << 20, 1 << 20, causal)
    pairs = sum(part.pairs(sizes) for part in parts_of(sizes, 1))
    report = simulate(
        sizes, ["a"] * devices, lambda device, part: part.pairs(sizes) / pairs, sure=sure
    )
    assert report.seconds * devices < 1.02


@pytest.mark.parametrize("seed", range(40))
def test_homes_are_of_equal_work(seed: int) -> None:
    draw = random.Random(seed)
    heads, devices = draw.randint(1, 40), draw.randint(2, 8)
    sizes = Sizes(draw.randint(1, 3), heads, heads, 1 << 17, 1 << 17, draw.random() < 0.5)
    parts = parts_of(sizes, devices)
    numbers = draw.sample(range(10), devices)  # of those that are alive
    homes = homes_of(sizes, parts, numbers)
    work = dict.fromkeys(numbers, 0)
    for part in parts:
        work[homes[part]] += part.pairs(sizes)
    assert max(work.values()) <= 1.03 * min(work.values())


@pytest.mark.parametrize("slow", [0.9, 0.6, 0.3])
def test_a_home_is_not_kept_from_others(slow: float) -> None:
    """A device that is slower than it was thought to be leaves the rest of its home to others."""
    sizes = Sizes(1, 32, 32, 1 << 20, 1 << 20, True)
    pairs = sum(part.pairs(sizes) for part in parts_of(sizes, 1))
    report = simulate(
        sizes, ["a", "a"], lambda device, part: part.pairs(sizes) / pairs / (slow, 1.0)[device]
    )
    ideal = 1 / (1 + slow)
    first = max(r.stop - r.start for r in report.ran if r.device == 0)
    # Nothing is idle but for one part; a first order that was too large is not taken back.
    assert report.seconds <= max(1.1 * ideal, 0.4 / slow + 1.5 * first)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize(
    "speeds", [(1.0, 0.5), (0.5, 1.0), (1.0, 0.25), (1.0, 1.0, 0.5), (0.7, 1.0)]
)
@pytest.mark.parametrize("known", [False, True])
def test_unequal_devices_share_heads_that_do_not_divide(
    heads: int, speeds: tuple[float, ...], known: bool
) -> None:
    """Within a tenth of an ideal split, also where nobody knew beforehand how quick each is."""
    sizes = Sizes(1, heads, heads, 1 << 17, 1 << 17, True)
    pairs = sum(part.pairs(sizes) for part in parts_of(sizes, 1))
    report = simulate(
        sizes, [f"device {n}" for n in range(len(speeds))],
        lambda device, part: part.pairs(sizes) / pairs / speeds[device],
        paces={n: 1 / speed for n, speed in enumerate(speeds)} if known else None,
    )  # fmt: skip
    assert report.seconds * sum(speeds) < 1.10
