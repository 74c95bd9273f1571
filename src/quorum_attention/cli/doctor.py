"""``doctor``: what this machine can run."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any

import torch
from rich.table import Table

import quorum_attention
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import console, print_json
from quorum_attention.execution.memory import available_bytes
from quorum_attention.kernels import CallShape, kernels, why_not
from quorum_attention.planner.calibration import machine_of
from quorum_attention.sizes import format_bytes

_OPTIONAL = ("triton", "matplotlib", "cuda-bindings", "safetensors", "numpy")


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("doctor", help="what this machine can run", description=__doc__)
    shared.add_json(parser)
    parser.set_defaults(run=_run)


def _devices() -> list[torch.device]:
    cuda = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [*cuda, torch.device("cpu")]


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def _verdicts(device: torch.device) -> dict[str, dict[str, str | None]]:
    """Kernel by kernel and dtype by dtype: None where it runs, else why not."""
    found: dict[str, dict[str, str | None]] = {}
    for name, kernel in kernels().items():
        for label, dtype in shared.DTYPES.items():
            call = CallShape(device.type, dtype, 4, 4, 64, 64, is_causal=True, needs_grad=True)
            found.setdefault(name, {})[label] = why_not(kernel, call, device)
    return found


def _calibrated(device: torch.device) -> bool:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    return machine_of(device, dtype, 64).measured


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(options: argparse.Namespace) -> int:
    versions = {
        "quorum-attention": quorum_attention.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: _version(package) for package in _OPTIONAL},
    }
    devices: list[dict[str, Any]] = [
        {
            "device": str(device),
            "name": _name(device),
            "free_bytes": available_bytes(device),
            "kernels": _verdicts(device),
            "calibrated": _calibrated(device),
        }
        for device in _devices()
    ]
    if options.json:
        print_json({"versions": versions, "devices": devices})
        return 0
    out = console()
    known = (f"{name} {version or 'not installed'}" for name, version in versions.items())
    out.print(", ".join(known), highlight=False)
    for entry in devices:
        table = Table(
            title=f"{entry['device']}: {entry['name']}, {format_bytes(entry['free_bytes'])} free",
            title_justify="left",
        )
        table.add_column("kernel")
        for label in shared.DTYPES:
            table.add_column(label)
        reasons: dict[str, str] = {}
        for name, verdicts in entry["kernels"].items():
            cells = []
            for verdict in verdicts.values():
                cells.append("yes" if verdict is None else "no")
                if verdict is not None:
                    reasons.setdefault(f"{name}: {verdict}", "")
            table.add_row(name, *cells)
        out.print(table)
        rates = "calibrated" if entry["calibrated"] else "assumed (quorum-attention calibrate)"
        out.print(f"  rates the planner uses: {rates}", highlight=False)
        for reason in reasons:
            out.print(f"  {reason}", highlight=False)
    return 0
