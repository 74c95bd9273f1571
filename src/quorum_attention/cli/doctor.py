"""``doctor``: which kernels this machine can run, for which dtypes, why not others, and
what would be faster."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import torch

import quorum_attention
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table
from quorum_attention.execution.device.lookup import GPU, backend_of
from quorum_attention.extras import install_hint, installed_version
from quorum_attention.kernels import CallShape, kernels, why_not
from quorum_attention.kernels.cache_files import refusal
from quorum_attention.plain_types import JsonObject
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.units import counted, format_bytes

_OPTIONAL = (
    "triton",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "matplotlib",
    "cuda-bindings",
    "safetensors",
    "numpy",
    "transformers",
)
_FA4_CAPABILITY = 9  # what FlashAttention-4 needs at least
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


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
    sentences = advice(
        devices,
        versions,
        n_threads=torch.get_num_threads(),
        n_cores=len(os.sched_getaffinity(0)),
        has_driver=_NVIDIA_DRIVER.exists(),
    )
    if options.json:
        print_json(
            {
                "versions": versions,
                "cache_not_used": reason,
                "devices": devices,
                "faster": sentences,
            }
        )
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
    say("what would be faster here:" if sentences else "nothing is missing here")
    for sentence in sentences:
        say(f"  {sentence}")
    return 0


def advice(
    devices: list[JsonObject],
    versions: dict[str, str | None],
    *,
    n_threads: int,
    n_cores: int,
    has_driver: bool,
) -> list[str]:
    """Return what would make calls faster, a sentence each, the largest gain first.

    Args:
        devices: as ``--json`` prints them.
        versions: of packages; None for one that is not installed.
        n_threads: that torch computes with.
        n_cores: that this process may use.
        has_driver: whether NVIDIA's driver is loaded.
    """
    gpus = [device for device in devices if device["capability"] is not None]
    sentences = []
    if has_driver and not gpus:
        sentences.append(
            "torch sees no GPU, though NVIDIA's driver is loaded: install a CUDA build "
            "of torch"
        )
    sentences += _advice_on_gpus(gpus, versions)
    if 2 * n_threads <= n_cores:
        threads = counted(n_threads, "thread")
        cores = counted(n_cores, "core")
        sentences.append(
            f"torch computes with {threads} on {cores}: raise OMP_NUM_THREADS"
        )
    if versions["transformers"] is None:
        hint = install_hint("transformers")
        sentences.append(f"long_context and long_prompt need Transformers: {hint}")
    return sentences


def _advice_on_gpus(
    gpus: list[JsonObject], versions: dict[str, str | None]
) -> list[str]:
    """Return what would make calls on these GPUs faster."""
    sentences = []
    runs_fa4 = any(gpu["capability"][0] >= _FA4_CAPABILITY for gpu in gpus)
    if runs_fa4 and versions["flash-attn-4"] is None:
        hint = install_hint("fa4")
        sentences.append(f"FlashAttention-4, on calls of many tokens: {hint}")
    uncalibrated = [
        gpu["device"] for gpu in gpus if len(gpu["calibrated"]) < len(shared.DTYPES)
    ]
    if uncalibrated:
        names = ", ".join(uncalibrated)
        sentences.append(
            "plans by measured rates, half a minute each: quorum-attention calibrate "
            f"({names})"
        )
    return sentences


def _versions() -> dict[str, str | None]:
    """Version by package; None if the package is not installed."""
    versions: dict[str, str | None] = {
        "quorum-attention": quorum_attention.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in _OPTIONAL:
        versions[name] = installed_version(name)
    return versions


def _describe_device(device: torch.device) -> JsonObject:
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
        "capability": _capability(device),
        "free_bytes": backend.free_bytes(device),
        "kernels": _verdicts(device),
    }


def _capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU; None of a CPU."""
    if device.type != GPU:
        return None
    return torch.cuda.get_device_capability(device)


def _rates_sentence(calibrated: list[str]) -> str:
    """Which dtypes' rates were measured, and how to measure others."""
    advice = "`quorum-attention calibrate` measures them in half a minute"
    if not calibrated:
        return f"predicted times use assumed rates; {advice}"
    dtypes = ", ".join(calibrated)
    return f"predicted times use measured rates for {dtypes}; for others {advice}"


def _show_device(description: JsonObject) -> None:
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
    say(f"  {_rates_sentence(description['calibrated'])}")
    for sentence in dict.fromkeys(sentences):
        say(f"  {sentence}")
