"""What a pool of devices would do: a pool's own parts and machine, made-up devices and a clock.

The machine is asked and told as by ``pool/run.py``; only seconds are predicted instead of measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from quorum_attention.execution.control.events import DeviceLost, UnitDone
from quorum_attention.execution.control.instructions import GiveUp
from quorum_attention.execution.control.machine import Limits, Machine
from quorum_attention.execution.report import Report
from quorum_attention.pool.parts import Part, Sizes, parts_of
from quorum_attention.pool.report import PoolPass, Ran

_WHOLE: tuple[int, ...] = ()


def simulate(
    sizes: Sizes,
    names: Sequence[str],
    seconds: Callable[[int, Part], float],
    lost: Mapping[int, float] | None = None,
) -> PoolPass:
    """A pass on devices that are not here.

    Args:
        sizes: of the call.
        names: of the devices; those of equal names are taken to be alike.
        seconds: predicted seconds of a part on a device, by its number.
        lost: devices that fail, and after how many seconds.

    Returns:
        The report that a pool would have filled, its times predicted.

    Raises:
        RuntimeError: all devices fail before the pass ends.
    """
    parts = parts_of(sizes, len(names), even=len(set(names)) == 1)
    report = PoolPass(devices=list(names), parts=len(parts))
    machine = Machine(parts, _never, Limits(0, 0), dict.fromkeys(range(len(names)), 1))  # type: ignore[arg-type]
    # (time, order, device, part), of failures with None; the order makes equal times repeatable.
    events: list[tuple[float, int, int, Part | None]] = []
    begun: dict[int, float] = {}
    for device, at in (lost or {}).items():
        heapq.heappush(events, (at, -1 - device, device, None))

    def launch(device: int, now: float) -> None:
        machine.start(device)
        found = machine.next(device)
        if found is not None:
            part: Part = found.group  # type: ignore[assignment]
            begun[device] = now
            heapq.heappush(events, (now + seconds(device, part), device, device, part))

    for device in range(len(names)):
        launch(device, 0.0)
    now = 0.0
    while not machine.finished:
        now, _, device, part = heapq.heappop(events)
        if device not in machine.devices:
            continue  # what a lost device would have finished
        if part is None:
            order = machine.on(DeviceLost(device))
            begun.pop(device, None)
            report.history.append(f"{names[device]}: lost after {now:.3g} s")
            if isinstance(order, GiveUp):
                raise RuntimeError(f"no device is left after {now:.3g} s: {machine.history}")
        else:
            machine.on(UnitDone(device, part, _WHOLE))  # type: ignore[arg-type]
            report.ran.append(Ran(device, parts.index(part), begun.pop(device), now, Report()))
        for other in machine.devices:
            if other not in begun:
                launch(other, now)
    report.seconds = now
    return report


def _never() -> None:
    raise AssertionError("simulated devices have memory enough")


__all__ = ["simulate"]
