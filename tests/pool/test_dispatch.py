"""Devices take shares by their pace, end together, and a slow one does not hold up the others."""

from __future__ import annotations

import random
from functools import partial

import pytest

from quorum_attention.execution.control.events import UnitDone
from quorum_attention.execution.control.machine import Limits, Machine
from quorum_attention.pool import dispatch as dispatch_module
from quorum_attention.pool.dispatch import Dispatcher
from quorum_attention.pool.parts import Part, Sizes, joined, parts_of
from quorum_attention.pool.simulate import simulate

SIZES = Sizes(1, 8, 8, 1 << 20, 1 << 20, True)
PAIRS = sum(part.pairs(SIZES) for part in parts_of(SIZES, 1))


def taking(*speeds: float, sizes: Sizes = SIZES, known: bool = True) -> float:
    """Makespan of a pass over the ideal one."""
    pairs = sum(part.pairs(sizes) for part in parts_of(sizes, 1))
    report = simulate(
        sizes,
        [f"device {speed}" for speed in speeds],
        lambda device, part: part.pairs(sizes) / pairs / speeds[device],
        paces={n: 1 / speed for n, speed in enumerate(speeds)} if known else None,
    )
    assert sorted(one.index for one in report.ran) == list(range(report.parts))
    return report.seconds * sum(speeds)


@pytest.mark.parametrize("slow", [0.9, 0.5, 0.25, 0.1, 0.05, 0.01, 0.0001])
@pytest.mark.parametrize("heads", [1, 2, 8, 33])
@pytest.mark.parametrize("causal", [False, True])
def test_a_slow_device_beside_a_quick_one(slow: float, heads: int, causal: bool) -> None:
    sizes = Sizes(1, heads, heads, 1 << 20, 1 << 20, causal)
    assert taking(1.0, slow, sizes=sizes) < 1.10
    assert taking(slow, 1.0, sizes=sizes) < 1.10


@pytest.mark.parametrize("seed", range(60))
def test_devices_of_any_speed(seed: int) -> None:
    draw = random.Random(seed)
    speeds = [10 ** draw.uniform(-2, 0) for _ in range(draw.randint(2, 8))]
    heads = draw.choice([1, 3, 8, 40])
    sizes = Sizes(draw.randint(1, 2), heads, heads, 1 << 20, 1 << 20, draw.random() < 0.5)
    assert taking(*speeds, sizes=sizes) < 1.10


@pytest.mark.parametrize("slow", [0.5, 0.25])
def test_half_the_speed_that_nobody_knew_of(slow: float) -> None:
    assert taking(1.0, slow, known=False) < 1.10
    assert taking(slow, 1.0, known=False) < 1.10


def test_alike_they_take_several_heads_at_once() -> None:
    """And single ones towards the end."""
    parts = parts_of(SIZES, 2)
    machine = Machine(parts, AssertionError, Limits(0, 0), {0: 1, 1: 1})
    dispatch = Dispatcher(
        machine, lambda part: part.pairs(SIZES), partial(joined, SIZES), alike=True
    )
    orders = [dispatch.take(device, 0.0) for device in dispatch.idle()]
    assert [order.part.heads for order in orders if order is not None] == [(0, 3), (3, 6)]
    assert all(order is not None and order.part.whole for order in orders)
    assert dispatch.idle() == []


def test_a_first_order_is_not_taken_for_the_pace() -> None:
    """Device 1 compiles for 1.5 s; what it does afterwards takes as long as device 0's."""
    parts = parts_of(SIZES, 2, even=False)

    def given(new: dict[int, float] | None) -> dict[int, int]:
        machine = Machine(parts, AssertionError, Limits(0, 0), {0: 1, 1: 1})
        pairs = parts[0].pairs(SIZES)
        dispatch = Dispatcher(machine, lambda part: part.pairs(SIZES), new=new)
        ends, count, now = {}, {0: 0, 1: 0}, 0.0
        while True:
            for device in dispatch.idle():
                order = dispatch.take(device, now)
                if order is not None:
                    first = 1.5 if device == 1 and not count[device] else 0.0
                    ends[device] = now + first + 0.1 * order.pairs / pairs
                    count[device] += 1
            if not ends:
                return count
            device = min(ends, key=lambda d: ends[d])
            now = ends.pop(device)
            for unit in dispatch.done(device, now).units:
                machine.on(UnitDone(device, unit, ()))

    assert given({0: 2.0, 1: 2.0})[1] > 1
    assert given(None)[1] == 1  # what it would be otherwise


@pytest.mark.parametrize("new", [0.5, 20.0])
def test_a_long_first_order_counts_beyond_what_is_new(new: float) -> None:
    machine = Machine(parts_of(SIZES, 2), AssertionError, Limits(0, 0), {0: 1, 1: 1})
    dispatch = Dispatcher(machine, lambda part: part.pairs(SIZES), new={0: new})
    order = dispatch.take(0, 0.0)
    assert order is not None
    for unit in dispatch.done(0, 10.0).units:
        machine.on(UnitDone(0, unit, ()))
    wanted = {0: pytest.approx((10 - new) / order.pairs)} if new < 10 else {}
    assert dispatch.paces == wanted
    assert dispatch.spent == {0: (0.0, 0)}
    order = dispatch.take(0, 10.0)
    assert order is not None
    dispatch.done(0, 13.0)
    assert dispatch.spent == {0: (3.0, order.pairs)}


@pytest.mark.parametrize("timed", [False, True])
def test_no_order_is_long(timed: bool) -> None:
    """A device that is lost loses its order: a second, or five, of a pass of minutes."""
    sizes = Sizes(1, 64, 64, 1 << 20, 1 << 20, True)
    parts = parts_of(sizes, 2)
    pairs = sum(part.pairs(sizes) for part in parts)
    paces = dict.fromkeys((0, 1), 2 * 60.0 / pairs)
    machine = Machine(parts, AssertionError, Limits(0, 0), {0: 1, 1: 1})
    dispatch = Dispatcher(
        machine, lambda part: part.pairs(sizes), partial(joined, sizes), paces, True, True,
        timed=timed,
    )  # fmt: skip
    first = dispatch.take(0, 0.0)
    assert first is not None
    if not timed:
        assert first.pairs >= 0.45 * pairs  # seconds are not known yet
    for unit in dispatch.done(0, first.pairs * paces[0]).units:
        machine.on(UnitDone(0, unit, ()))
    order = dispatch.take(0, first.pairs * paces[0])
    assert order is not None
    largest = max(part.pairs(sizes) for part in parts) * paces[0]
    for one in (first, order) if timed else (order,):
        assert one.pairs * paces[0] <= max(dispatch_module._LONGEST_SECONDS, largest)


@pytest.mark.parametrize("seed", range(300))
def test_joined_parts_are_what_they_were(seed: int) -> None:
    """Joined, neighbours are one call's: rows of some heads, or heads of a key/value head, or whole
    key/value heads; nothing else is joined."""
    draw = random.Random(seed)
    kv_heads, share = draw.randint(1, 4), draw.choice([1, 2, 3])
    sizes = Sizes(2, kv_heads * share, kv_heads, 1000, 1000, draw.random() < 0.5)
    parts = parts_of(sizes, draw.randint(1, 5), even=draw.random() < 0.5)
    at = 0
    while at < len(parts):
        whole: Part = parts[at]
        rows = {(h, r) for h in range(*whole.heads) for r in range(0, 1000, 8)
                if whole.rows.start <= r < whole.rows.stop}  # fmt: skip
        while at + 1 < len(parts):
            more = joined(sizes, whole, parts[at + 1])
            if more is None:
                break
            other = parts[at + 1]
            rows |= {(h, r) for h in range(*other.heads) for r in range(0, 1000, 8)
                     if other.rows.start <= r < other.rows.stop}  # fmt: skip
            assert more.pairs(sizes) == whole.pairs(sizes) + other.pairs(sizes)
            whole, at = more, at + 1
        assert {(h, r) for h in range(*whole.heads) for r in range(0, 1000, 8)
                if whole.rows.start <= r < whole.rows.stop} == rows  # fmt: skip
        kv = whole.kv(sizes)
        assert whole.heads.length % kv.length == 0
        complete = whole.heads == (kv.start * share, kv.stop * share)
        assert whole.whole == (complete and whole.rows == (0, 1000))
        assert kv.length == 1 or complete
        at += 1
