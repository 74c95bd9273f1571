"""A pass on devices that are not here."""

from __future__ import annotations

from collections.abc import Sequence

from quorum_attention.devices.partition import pieces_of
from quorum_attention.devices.report import PartTiming, PoolPass
from quorum_attention.devices.work_queue import BlockQueue
from quorum_attention.execution.report import Report
from quorum_attention.kernels.call_shape import CallShape

# A work item takes this much beside the call that computes it: its messages and what the worker
# maps.
_ITEM_SECONDS = 0.007


def simulate(shape: CallShape, devices: Sequence[tuple[str, float]], seconds: float) -> PoolPass:
    """Predict a pass on devices.

    Args:
        devices: a name and a speed each; devices of one name are alike.
        seconds: the time of the whole call on a device of speed 1.

    Returns:
        The report that a pool would have filled, its times predicted.
    """
    pairs_per_second = shape.batch * shape.heads * shape.pairs / seconds
    speeds = {number: speed * pairs_per_second for number, (_, speed) in enumerate(devices)}
    pieces = pieces_of(shape, speeds, uniform_cost=len(set(devices)) == 1)
    queue = BlockQueue(shape, speeds, pieces)
    report = PoolPass(devices=[name for name, _ in devices], parts=queue.count)
    item_ends: dict[int, float] = {}  # of the items that run, by device
    now = 0.0
    while not queue.is_finished:
        idle = queue.devices - item_ends.keys()
        for device in sorted(idle, key=lambda number: -speeds[number]):
            item = queue.take(device, now)
            if item is not None:
                item_ends[device] = now + _ITEM_SECONDS + item.pairs / speeds[device]
        device = min(item_ends, key=lambda number: (item_ends[number], number))
        now = item_ends.pop(device)
        item = queue.running.pop(device)
        report.ran.append(PartTiming(device, item.number, item.start, now, Report()))
    report.seconds = now
    return report
