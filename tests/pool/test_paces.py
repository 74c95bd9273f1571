"""A device that was slow once is not left idle; one that is slow gets less."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quorum_attention.pool import Pool, PoolReport, paces
from quorum_attention.pool.paces import Readings, even, paces_of

ALIKE = {0: 1e-10, 1: 1e-10}


def seen(**calls: list[float]) -> dict[int, Readings]:
    """Readings of calls of a billion pairs, in seconds."""
    found = {}
    for number, seconds in enumerate(calls.values()):
        found[number] = Readings()
        for each in seconds:
            found[number].took_part("kind", each, 10**9)
    return found


def test_what_nobody_has_seen() -> None:
    assert paces_of(seen(a=[], b=[]), "kind", ALIKE) == ALIKE


def test_slow_once() -> None:
    """It opened, compiled or planned something: as quick as the other."""
    found = paces_of(seen(a=[0.1], b=[9.0]), "kind", ALIKE)
    assert found == {0: pytest.approx(1e-10), 1: pytest.approx(1e-10)}
    assert paces_of(seen(a=[0.1, 0.1], b=[9.0]), "kind", ALIKE)[1] == pytest.approx(1e-10)


def test_slow_twice() -> None:
    found = paces_of(seen(a=[0.1, 0.1], b=[0.4, 0.5]), "kind", ALIKE)
    assert found == {0: pytest.approx(1e-10), 1: pytest.approx(4e-10)}


def test_one_bad_call_among_good_ones_does_not_count() -> None:
    found = paces_of(seen(a=[0.1] * 5, b=[0.2, 0.2, 7.0]), "kind", ALIKE)
    assert found[1] == pytest.approx(2e-10)


def test_it_becomes_slower_or_quicker() -> None:
    assert paces_of(seen(a=[0.1] * 5, b=[0.1] * 5 + [0.3] * 3), "kind", ALIKE)[1] > 2e-10
    assert paces_of(seen(a=[0.1] * 5, b=[0.3] * 5 + [0.1]), "kind", ALIKE)[1] < 2e-10


def test_others_are_expected_beside_those_that_were_seen() -> None:
    found = paces_of(seen(a=[0.3, 0.3], b=[]), "kind", {0: 1e-10, 1: 4e-10})
    assert found[1] == pytest.approx(12e-10)


@pytest.mark.parametrize("heads", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("slow", [1.0, 1.12, 1.2, 1.3, 1.45])
def test_devices_are_even_as_long_as_no_part_should_change_places(heads: int, slow: float) -> None:
    """Of two devices with as many heads each, one of them slower: orders of other sizes would have
    to be planned and prepared, for nothing."""
    moved = max(heads + 1.0, (heads - 1) * slow)
    assert even([1.0, slow], 1 / heads) == (slow <= 1.1 or moved >= heads * slow)
    assert even([], 1 / heads)


def test_short_calls_say_nothing() -> None:
    readings = seen(a=[0.001] * 5, b=[0.04] * 5)
    assert paces_of(readings, "kind", ALIKE) == ALIKE
    assert all(one.short("kind") and one.met("kind") for one in readings.values())


def test_a_first_order_says_nothing() -> None:
    one = Readings()
    one.took_part("kind", 0.0, 0)
    assert one.met("kind")
    assert not one.short("kind")
    assert one.pace("kind") is None


def test_it_is_tried_again() -> None:
    one = seen(a=[9.0, 9.0])[0]
    for _ in range(paces._LEFT_OUT - 1):
        one.was_left_out("kind")
    assert one.pace("kind") is not None
    one.was_left_out("kind")
    assert one.pace("kind") is None


def test_left_out_is_counted_one_after_the_other() -> None:
    one = seen(a=[9.0, 9.0])[0]
    for _ in range(3 * paces._LEFT_OUT):
        one.was_left_out("kind")
        one.took_part("kind", 9.0, 10**9)
    assert one.pace("kind") is not None


def test_a_worker_that_was_slow_once_takes_part() -> None:
    """In small calls, whose parts say nothing of paces themselves."""
    q = torch.randn(1, 4, 200, 8).share_memory_()
    with Pool(["cpu", "cpu"], threads=1) as pool:

        def devices() -> set[int]:
            report = PoolReport()
            pool.attention(q, q, q, is_causal=True, report=report)
            assert report.forward is not None
            return {one.device for one in report.forward.ran}

        assert devices() == {0, 1}
        slow = pool.workers[1].readings
        kinds: list[Any] = list(slow._met)
        assert kinds
        for kind in kinds:
            slow.took_part(kind, 5.0, 100)
            pool.workers[0].readings.took_part(kind, 0.06, 10**9)
        assert devices() == {0, 1}
