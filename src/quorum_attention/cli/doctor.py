"""``doctor``: which kernels this machine can run, for which dtypes, and why not
others."""

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
    "triton",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "matplotlib",
    "cuda-bindings",
    "safetensors",
    "numpy",
)


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = shared.add_command(
        commands, "doctor", "list kernels that can run here", __doc__, _run
    )
    shared.add(parser, shared.JSON)


def _verdicts(device: torch.device) -> dict[str, dict[str, str | None]]:
    """The reason why a kernel does not run, by kernel and dtype; None where it runs."""
    calls = {
        label: CallShape(
            device.type, dtype, 4, 4, 64, 64, is_causal=True, needs_grad=True
        )
        for label, dtype in shared.DTYPES.items()
    }
    return {
        name: {label: why_not(kernel, call, device) for label, call in calls.items()}
        for name, kernel in kernels().items()
    }


def _run(options: argparse.Namespace) -> int:
    versions = _versions()
    cuda = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    devices = [_describe_device(device) for device in (*cuda, torch.device("cpu"))]
    reason = refusal()
    if options.json:
        print_json({"versions": versions, "cache_not_used": reason, "devices": devices})
        return 0
    say(
        ", ".join(
            f"{name} {version or 'not installed'}" for name, version in versions.items()
        )
    )
    if reason is not None:
        say(f"the cache is not used: {reason}")
    for description in devices:
        _show_device(description)
    return 0


def _versions() -> dict[str, str | None]:
    """Version by package; None if the package is not installed."""
    versions: dict[str, str | None] = {
        "quorum-attention": quorum_attention.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in _OPTIONAL:
        versions[name] = next(
            (package.version for package in distributions(name=name)), None
        )
    return versions


def _describe_device(device: torch.device) -> dict[str, Any]:
    """A device in plain types, as ``--json`` prints it."""
    backend = backend_of(device)
    calibrated = [
        label
        for label, dtype in shared.DTYPES.items()
        if hardware_of(device, dtype, 64).measured
    ]
    return {
        "device": str(device),
        "name": backend.model(device).removeprefix("cpu "),
        "calibrated": calibrated,
        "free_bytes": backend.free_bytes(device),
        "kernels": _verdicts(device),
    }


def _show_device(description: dict[str, Any]) -> None:
    rows = []
    # Several dtypes of a kernel have the same sentence.
    sentences: list[str] = []
    for kernel, verdicts in description["kernels"].items():
        cells = ["no" if reason else "yes" for reason in verdicts.values()]
        rows.append([kernel, *cells])
        sentences += [f"{kernel}: {reason}" for reason in verdicts.values() if reason]
    free = format_bytes(description["free_bytes"])
    title = f"{description['device']}: {description['name']}, {free} free"
    dtypes = list(shared.DTYPES)
    show_table(["kernel", *dtypes], rows, title=title, words=dtypes)
    calibrated = ", ".join(description["calibrated"]) or "no dtype"
    note = "assumed for others; see quorum-attention calibrate --help"
    say(f"  the planner's rates: calibrated for {calibrated} ({note})")
    for sentence in dict.fromkeys(sentences):
        say(f"  {sentence}")
