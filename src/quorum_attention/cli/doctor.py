"""``doctor``: which kernels this machine can run, for which dtypes, and why not others."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import distributions
from typing import Any

import torch

import quorum_attention
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.kernels import CallShape, kernels, why_not
from quorum_attention.kernels.cache_files import refusal
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.units import format_bytes

_OPTIONAL = (
    "triton", "flash-attn-4", "nvidia-cutlass-dsl", "matplotlib", "cuda-bindings", "safetensors",
    "numpy",
)  # fmt: skip


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = shared.add_command(commands, "doctor", "list kernels that can run here", __doc__, _run)
    shared.add(parser, shared.JSON)


def _verdicts(device: torch.device) -> dict[str, dict[str, str | None]]:
    """Kernel by kernel and dtype by dtype: None where it runs, else why not."""
    calls = {
        label: CallShape(device.type, dtype, 4, 4, 64, 64, is_causal=True, needs_grad=True)
        for label, dtype in shared.DTYPES.items()
    }
    return {
        name: {label: why_not(kernel, call, device) for label, call in calls.items()}
        for name, kernel in kernels().items()
    }


def _run(options: argparse.Namespace) -> int:
    versions: dict[str, str | None] = {
        "quorum-attention": quorum_attention.__version__, "python": platform.python_version(),
        "torch": torch.__version__,
    }  # fmt: skip
    for name in _OPTIONAL:
        versions[name] = next((found.version for found in distributions(name=name)), None)
    cuda = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    devices: list[dict[str, Any]] = []
    for device in (*cuda, torch.device("cpu")):
        known = [n for n, dtype in shared.DTYPES.items() if hardware_of(device, dtype, 64).measured]
        name = backend_of(device).model(device).removeprefix("cpu ")
        devices.append({
            "device": str(device), "name": name, "calibrated": known,
            "free_bytes": backend_of(device).free_bytes(device), "kernels": _verdicts(device),
        })  # fmt: skip
    why = refusal()
    if options.json:
        print_json({"versions": versions, "cache_not_used": why, "devices": devices})
        return 0
    say(", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()))
    if why is not None:
        say(f"the cache is not used: {why}")
    for entry in devices:
        reasons: dict[str, None] = {}
        rows = []
        for name, verdicts in entry["kernels"].items():
            rows.append([name, *("no" if why else "yes" for why in verdicts.values())])
            reasons |= dict.fromkeys(f"{name}: {why}" for why in verdicts.values() if why)
        free = format_bytes(entry["free_bytes"])
        title = f"{entry['device']}: {entry['name']}, {free} free"
        show_table(["kernel", *shared.DTYPES], rows, title=title, left=list(shared.DTYPES))
        calibrated = ", ".join(entry["calibrated"]) or "no dtype"
        how = "assumed for others; see quorum-attention calibrate --help"
        say(f"  the planner's rates: calibrated for {calibrated} ({how})")
        for reason in reasons:
            say(f"  {reason}")
    return 0
