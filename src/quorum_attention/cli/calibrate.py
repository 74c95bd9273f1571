"""``calibrate``: measure how fast this machine is, for predictions of time. Each rate
is measured three times and the median is kept. Run it while the machine is idle: if the
three differ too much, nothing is stored.
"""

from __future__ import annotations

import argparse
from typing import Any

from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table, warn
from quorum_attention.planner.calibration import Calibration, calibrate
from quorum_attention.units import counted


def add_to(commands: Any) -> None:
    """Add the command."""
    summary = "measure this machine, for better predictions"
    parser = shared.add_command(commands, "calibrate", summary, __doc__, _run)
    shared.add(parser, shared.DEVICE, shared.DTYPE, shared.JSON)


def _run(options: argparse.Namespace) -> int:
    device = shared.default_device(options.device)
    dtype = options.dtype or shared.default_dtype(device.type)
    calibration = calibrate(device, dtype, warn)
    if options.json:
        print_json(
            {
                "key": calibration.key,
                "seconds": calibration.seconds,
                "rounds": calibration.rounds,
                "spread": calibration.spread,
                **calibration.figures,
            }
        )
        return 0
    show_table(
        ["figure", "median", "spread"], _rows(calibration), title=calibration.key
    )
    say(
        f"measured {counted(calibration.rounds, 'time')} in {calibration.seconds:.1f} "
        f"s; stored in {calibration.path}; plans use it from now on"
    )
    return 0


def _rows(calibration: Calibration) -> list[list[str]]:
    spreads = {name: f"{spread - 1:.0%}" for name, spread in calibration.spread.items()}
    rows = []
    for head_dim, rates in calibration.figures["flops"].items():
        for direction, rate in zip(("forward", "backward"), rates, strict=True):
            name = f"head_dim {head_dim} {direction}"
            figure = f"{rate / 1e12:.3g} TFLOP/s"
            rows.append([name, figure, spreads[name]])
    for name, value in calibration.figures.items():
        if isinstance(value, float):
            label = name.removesuffix("_bytes_per_second").replace("_", " ")
            figure = _figure(name, value)
            spread = spreads.get(name, "")
            rows.append([label, figure, spread])
    return rows


def _figure(name: str, value: float) -> str:
    """A value with the unit that its name ends with."""
    if name.endswith("_bytes_per_second"):
        return f"{value / 1e9:.3g} GB/s"
    if name.endswith("_seconds"):
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g}"
