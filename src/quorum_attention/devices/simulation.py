"""A pass on devices that are not here."""

from __future__ import annotations

from collections.abc import Sequence

from quorum_attention.devices.partition import pieces_of
from quorum_attention.devices.report import PartTiming, PoolPass
from quorum_attention.devices.work_queue import BlockQueue
from quorum_attention.execution.report import Report
from quorum_attention.kernels.call_shape import CallShape

# A work item takes this much beside the call that computes it: its messages and what
# the worker maps.
_ITEM_SECONDS = 0.007


def simulate(
    shape: CallShape, devices: Sequence[tuple[str, float]], seconds: float
) -> PoolPass:
    """Predict a pass on devices.

    Args:
        devices: a name and a speed each; devices of one name are alike.
        seconds: the time of the whole call on a device of speed 1.

    Returns:
        The report that a pool would have filled, its times predicted.
    """
    n_pairs = shape.lanes * shape.pairs
    names: list[str] = []
    speeds: dict[int, float] = {}
    for number, (name, speed) in enumerate(devices):
        names.append(name)
        speeds[number] = speed * n_pairs / seconds
    is_homogeneous = len(set(devices)) == 1
    pieces = pieces_of(shape, speeds, uniform_cost=is_homogeneous)
    queue = BlockQueue(shape, speeds, pieces)
    report = PoolPass(devices=names, parts=queue.count)
    item_ends: dict[int, float] = {}  # of the items that run, by device
    now = 0.0
    fastest_first = sorted(speeds, key=lambda number: (-speeds[number], number))
    while not queue.is_finished:
        for device in fastest_first:
            item = None if device in item_ends else queue.take(device, now)
            if item is not None:
                compute_seconds = item.pairs / speeds[device]
                item_ends[device] = now + _ITEM_SECONDS + compute_seconds
        now, device = min((end, device) for device, end in item_ends.items())
        del item_ends[device]
        item = queue.running.pop(device)
        timing = PartTiming(
            device,
            item.number,
            item.start,
            now,
            Report(),
        )
        report.ran.append(timing)
    report.seconds = now
    return report
