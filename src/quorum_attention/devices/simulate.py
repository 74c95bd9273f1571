"""What devices would do that are not here: a pass's own blocks and schedule, a made-up clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import torch

from quorum_attention.call.block import WholeCall
from quorum_attention.devices.partition import pairs, partition, pieces_of
from quorum_attention.devices.report import PoolPass, Ran
from quorum_attention.devices.scheduler import Schedule
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.report import Report
from quorum_attention.planner.calibration import calibrated_flops
from quorum_attention.planner.estimate import plan
from quorum_attention.planner.hardware import assumed

# Relative to an H200, whose rates the planner assumes (docs/planner.md). FlashAttention's published
# forward at head dimension 128 over cuDNN's there: 740 TFLOP/s on an H100 (version 3), 225 on an
# A100 (version 2); an H20 by its peak.
SPEEDS = {"H200": 1.0, "H100": 0.95, "H800": 0.95, "A100": 0.36, "H20": 0.15}
# What an order takes beside the call that computes it: its messages and what the worker maps.
_ORDER_SECONDS = 0.007


def expected_speed(
    device: str, name: str, dtype: torch.dtype, head_dim: int, *, backward: bool
) -> float:
    """Pairs a second of a device, calibrated where it has been, else assumed.

    Args:
        device: as torch calls it; ``name``: its own name.
    """
    place = torch.device(device)
    backend = backend_of(place)
    measured = calibrated_flops(backend, name, dtype, head_dim)
    if measured is not None:
        return measured[backward] / head_dim
    usual = assumed(place.type, dtype, head_dim)
    relative = next((speed for known, speed in SPEEDS.items() if known in name), 1.0)
    return relative * (usual.backward_flops if backward else usual.flops) / head_dim


def predicted(call: WholeCall, *, backward: bool, **options: Any) -> float:
    """Seconds on an H200 for a pair, as the planner predicts for the whole call.

    Args:
        options: other arguments of ``plan``: head_dim, dtype, budget, kernel, device ...
    """
    made = plan(
        call.n_queries, n_keys=call.n_keys, heads=call.heads, kv_heads=call.kv_heads,
        batch=math.prod(call.batch_shape), is_causal=call.is_causal, backward=backward, **options,
    )  # fmt: skip
    return made.predicted_seconds / max(1, sum(pairs(call, b) for b in partition(call, [1.0])[0]))


def simulate(
    call: WholeCall, devices: Sequence[tuple[str, float]], pair_seconds: float
) -> PoolPass:
    """A pass on devices, each a name and its speed; devices of equal names are alike.

    Args:
        pair_seconds: of a pair on a device of speed 1.

    Returns:
        the report that a pool would have filled, its times predicted.
    """
    speeds = {number: speed / pair_seconds for number, (_, speed) in enumerate(devices)}
    pieces = pieces_of(call, speeds, alike=len(set(devices)) == 1)
    schedule = Schedule(call, speeds, pieces)
    report = PoolPass(devices=[name for name, _ in devices], parts=schedule.count)
    events: list[tuple[float, int]] = []
    idle, now = set(schedule.devices), 0.0
    while not schedule.finished:
        for device in sorted(idle, key=lambda device: -speeds[device]):
            order = schedule.take(device, now)
            if order is not None:
                idle.discard(device)
                takes = _ORDER_SECONDS + order.work / speeds[device]
                heapq.heappush(events, (now + takes, device))
        now, device = heapq.heappop(events)
        order = schedule.running.pop(device)
        report.ran.append(Ran(device, order.number, order.begun, now, Report()))
        idle.add(device)
    report.seconds = now
    return report
