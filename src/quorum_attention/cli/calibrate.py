"""``calibrate``: measure how fast this machine is, for predictions of time. Each rate is measured
three times and the median is kept. Run it while the machine is idle: if the three differ too much,
nothing is stored.
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
    found = calibrate(device, options.dtype or shared.default_dtype(device.type), warn)
    if options.json:
        of_all = {name: getattr(found, name) for name in ("key", "seconds", "rounds", "spread")}
        print_json({**of_all, **found.figures})
        return 0
    show_table(["figure", "median", "spread"], _rows(found), title=found.key)
    say(
        f"measured {counted(found.rounds, 'time')} in {found.seconds:.1f} s; stored in "
        f"{found.path}; plans use it from now on"
    )
    return 0


def _rows(found: Calibration) -> list[list[str]]:
    off = {name: f"{spread - 1:.0%}" for name, spread in found.spread.items()}
    rows = []
    for head_dim, rates in found.figures["flops"].items():
        for which, rate in zip(("forward", "backward"), rates, strict=True):
            name = f"head_dim {head_dim} {which}"
            rows.append([name, f"{rate / 1e12:.3g} TFLOP/s", off[name]])
    for name, value in found.figures.items():
        if not isinstance(value, float):
            continue
        if name.endswith("_bytes_per_second"):
            text = f"{value / 1e9:.3g} GB/s"
        else:
            text = f"{value * 1e3:.3g} ms" if name.endswith("_seconds") else f"{value:.3g}"
        label = name.removesuffix("_bytes_per_second").replace("_", " ")
        rows.append([label, text, off.get(name, "")])
    return rows
