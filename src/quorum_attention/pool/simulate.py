"""What a pool of devices would do: a pool's own parts and machine, made-up devices and a clock.

The machine is asked and told as by ``pool/run.py``; only seconds are predicted instead of measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

from quorum_attention.execution.control.events import DeviceLost, GiveUp, UnitDone
from quorum_attention.execution.control.machine import Limits, Machine
from quorum_attention.execution.report import Report
from quorum_attention.pool.dispatch import Dispatcher, Order
from quorum_attention.pool.parts import Part, Sizes, cut_part, homes_of, joined, parts_of
from quorum_attention.pool.report import PoolPass, ran

_WHOLE: tuple[int, ...] = ()
# What an order takes beside the call that computes it: its messages and what the worker opens (two
# H200s, 5 to 8 ms; benchmarks/gaps.py measures it where there is no GPU).
ORDER_SECONDS = 0.007


def simulate(
    sizes: Sizes,
    names: Sequence[str],
    seconds: Callable[[int, Part], float],
    lost: Mapping[int, float] | None = None,
    paces: Mapping[int, float] | None = None,
    sure: bool = False,
    order_seconds: float = 0.0,
) -> PoolPass:
    """A pass on devices that are not here.

    Args:
        sizes: of the call.
        names: of the devices; those of equal names are taken to be alike.
        seconds: predicted seconds of a part on a device, by its number.
        lost: devices that fail, and after how many seconds.
        paces: relative times of devices, by number, as far as they are known beforehand.
        sure: whether devices that are alike were seen to be (pool/dispatch.py).
        order_seconds: what an order takes beside its ``seconds``, if its worker had to wait for it.

    Returns:
        The report that a pool would have filled, its times predicted.

    Raises:
        RuntimeError: all devices fail before the pass ends.
    """
    known = list((paces or {}).values())
    alike = len(set(names)) == 1
    parts = parts_of(sizes, len(names), alike, known)
    report = PoolPass(devices=list(names), parts=len(parts))
    machine = Machine(parts, _never, Limits(0, 0), dict.fromkeys(range(len(names)), 1))
    numbers = {part: number for number, part in enumerate(parts)}
    dispatch = Dispatcher(
        machine, lambda part: part.pairs(sizes), partial(joined, sizes), paces, alike, sure,
        homes=homes_of(sizes, parts, range(len(names))) if alike else None,
        cut=partial(cut_part, sizes),
    )  # fmt: skip
    # (time, tie, device, order), of failures with None; the tie makes equal times repeatable.
    events: list[tuple[float, int, int, Order | None]] = []
    for device, at in (lost or {}).items():
        heapq.heappush(events, (at, -1 - device, device, None))

    def begun(device: int, now: float, order: Order | None, waited: float) -> None:
        if order is not None:
            takes = waited + seconds(device, order.part)
            heapq.heappush(events, (now + takes, device, device, order))

    def launch(now: float) -> None:
        for device in dispatch.idle():
            behind = dispatch.behind(device, now)
            if behind is not None:
                dispatch.withdrawn(behind)
            begun(device, now, dispatch.take(device, now), order_seconds)
        for device in list(dispatch.orders):
            dispatch.ahead(device, now)

    launch(0.0)
    now = 0.0
    while not machine.finished:
        now, _, device, order = heapq.heappop(events)
        if device not in machine.devices:
            continue  # what a lost device would have finished
        if order is None:
            answer = machine.on(DeviceLost(device))
            dispatch.lost(device)
            report.history.append(f"{names[device]}: lost after {now:.3g} s")
            for number in list(dispatch.queued):
                dispatch.withdrawn(number)
            for part, pieces in dispatch.cut_anew(now).items():
                more = range(report.parts, report.parts + len(pieces) - 1)
                numbers |= dict(zip(pieces, (numbers[part], *more), strict=True))
                report.parts += len(more)
            if isinstance(answer, GiveUp):
                raise RuntimeError(f"no device is left after {now:.3g} s: {machine.history}")
        else:
            dispatch.done(device, now)
            for unit in order.units:
                machine.on(UnitDone(device, unit, _WHOLE))
            begun(device, now, dispatch.go_on(device, now), 0.0)
            shares = [(numbers[unit], unit.pairs(sizes)) for unit in order.units]
            report.ran += ran(device, shares, order.begun, now, Report())
        launch(now)
    report.seconds = now
    return report


def _never() -> NoReturn:
    raise AssertionError("simulated devices have memory enough")


__all__ = ["ORDER_SECONDS", "simulate"]
