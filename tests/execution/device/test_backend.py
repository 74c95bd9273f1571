"""What the allocators of devices round to."""

from __future__ import annotations

from quorum_attention.execution.device.lookup import BACKENDS


def test_rounding_is_what_allocators_do() -> None:
    small, large = [100, 1 << 20], [(1 << 20) + 1]
    assert BACKENDS["cpu"].rounding(small + large) == 3 * 512
    assert BACKENDS["cuda"].rounding(small) == 2 * 512
    assert BACKENDS["cuda"].rounding(small + large) == 3 * 512 + (1 << 20)
