"""Clocks: seconds by stage, and that a device's own are read only once they have passed."""

from __future__ import annotations

from quorum_attention.execution.device.mover import STAGES, HostClock


def test_sums_by_stage() -> None:
    clock = HostClock()
    assert clock.seconds() == dict.fromkeys(STAGES, 0.0)
    for stage, seconds in (("h2d", 1.0), ("h2d", 2.0), ("compute", 5.0), ("merge", 0.5)):
        clock.add(stage, seconds)
    # Merges happen inside the kernel calls.
    assert clock.seconds() == {**dict.fromkeys(STAGES, 0.0), "h2d": 3, "compute": 4.5, "merge": 0.5}
