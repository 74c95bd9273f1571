"""``calibrate``: measure this machine once, so that predicted times are its own."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.table import Table

from quorum_attention.cli import options as shared
from quorum_attention.cli.output import console, print_json
from quorum_attention.planner.calibration import calibrate


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "calibrate", help="measure this machine for the planner", description=__doc__
    )
    shared.add_device(parser)
    parser.add_argument(
        "--dtype", type=shared.dtype_of, metavar="DTYPE", help="default: float16, on a CPU float32"
    )
    shared.add_json(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    device = shared.default_device(options.device)
    usual = torch.float16 if device.type == "cuda" else torch.float32
    found = calibrate(device, options.dtype or usual)
    if options.json:
        print_json({"key": found.key, "seconds": found.seconds, **found.figures})
        return 0
    out = console()
    table = Table(title=found.key, title_justify="left", show_header=False)
    for name, value in found.figures.items():
        if name == "flops":
            for head_dim, (forward, backward) in value.items():
                rates = f"{forward / 1e12:.3g} / {backward / 1e12:.3g} TFLOP/s"
                table.add_row(f"head_dim {head_dim}, forward / backward", rates)
        elif isinstance(value, float):
            table.add_row(name, f"{value:.4g}")
        else:
            table.add_row(name, str(value))
    out.print(table)
    out.print(f"measured in {found.seconds:.1f} s; plans use it from now on", highlight=False)
    return 0
