"""``calibrate``: measure this machine once, so that predicted times are its own."""

from __future__ import annotations

import argparse
from typing import Any

from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table, warn
from quorum_attention.planner.calibration import Calibration, calibrate


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = shared.add_command(
        commands, "calibrate", "measure this machine for the planner", _DESCRIPTION
    )
    shared.add(parser, shared.DEVICE, shared.DTYPE, shared.JSON)
    parser.set_defaults(run=_run)


_DESCRIPTION = (
    "Measure this machine, so that predicted times are its own: everything three times, the "
    "median is kept. Best done while nothing else runs; measurements that disagree with each "
    "other are refused, and nothing is stored."
)


def _run(options: argparse.Namespace) -> int:
    device = shared.default_device(options.device)
    found = calibrate(device, options.dtype or shared.default_dtype(device.type), warn)
    if options.json:
        of_all = {name: getattr(found, name) for name in ("key", "seconds", "rounds", "spread")}
        print_json({**of_all, **found.figures})
        return 0
    show_table(["figure", "median", "they differ by"], _rows(found), title=found.key)
    say(
        f"measured {found.rounds} times in {found.seconds:.1f} s; kept in {found.path}; plans use "
        f"it from now on"
    )
    return 0


def _rows(found: Calibration) -> list[list[str]]:
    def off(name: str) -> str:
        return f"{found.spread[name] - 1:.0%}" if name in found.spread else ""

    rows = []
    for name, value in found.figures.items():
        if name == "flops":
            for head_dim, rates in value.items():
                for which, rate in zip(("forward", "backward"), rates, strict=True):
                    label = f"head_dim {head_dim} {which}"
                    rows.append([label, f"{rate / 1e12:.3g} TFLOP/s", off(label)])
        elif name.endswith("_bytes_per_second"):
            rows.append(
                [name.removesuffix("_bytes_per_second"), f"{value / 1e9:.3g} GB/s", off(name)]
            )
        elif name.endswith("_seconds"):
            label = f"{name.removesuffix('_seconds')}, each"
            rows.append([label, f"{value * 1e3:.3g} ms", off(name)])
        elif name == "filling_causal":
            rows.append(["rows that half fill a causal call", f"{value:.3g}", ""])
        else:
            rows.append([name, str(value), ""])
    return rows
