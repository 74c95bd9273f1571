"""What of a call is not a tensor: checked, with every default settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from quorum_attention.execution.report import Report
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.planner.plan import Plan
from quorum_attention.sizes import parse_bytes

Device = str | torch.device


@dataclass(frozen=True, slots=True)
class Options:
    """See ``settle``."""

    scale: float
    attn_mask: torch.Tensor | None
    is_causal: bool
    enable_gqa: bool
    budget_bytes: int | None
    plan: Plan | None
    depth: int | None
    kernel: str | InnerKernel
    accumulator: Literal["device", "host"] | None
    device: torch.device
    progress: Any
    report: Report | None


def settle(
    query: torch.Tensor,
    scale: float | None,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    budget: int | str | None,
    plan: Plan | None,
    depth: int | str,
    kernel: str | InnerKernel,
    accumulator: str,
    devices: Device | Sequence[Device] | None,
    progress: Any,
    report: Report | None,
) -> Options:
    """The options of a call, from what its caller wrote.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that makes no sense, by name.
    """
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan must come from quorum_attention.plan, got {type(plan).__name__}")
    if plan is not None and depth != "auto":
        raise ValueError("plan and depth cannot both be given: a plan pins its own depth")
    if report is not None and not isinstance(report, Report):
        raise TypeError(f"report must be a quorum_attention.Report, got {type(report).__name__}")
    home: Literal["device", "host"] | None = None
    if accumulator == "device":
        home = "device"
    elif accumulator == "host":
        home = "host"
    return Options(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        attn_mask=attn_mask,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        budget_bytes=None if budget is None else parse_bytes(budget),
        plan=plan,
        depth=None if depth == "auto" else int(depth),
        kernel=kernel if plan is None or kernel != "auto" else plan.kernel,
        accumulator=home,
        device=compute_device(query.device, devices),
        progress=progress,
        report=report,
    )


def compute_device(inputs: torch.device, devices: Device | Sequence[Device] | None) -> torch.device:
    """Where a call computes."""
    if devices is None:
        if inputs.type == "cpu" and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return inputs
    chosen = [devices] if isinstance(devices, (str, torch.device)) else list(devices)
    if len(chosen) != 1:
        raise NotImplementedError(
            f"devices must name one device, got {len(chosen)}; several are not supported yet"
        )
    device = torch.device(chosen[0])
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"devices must be 'cpu' or 'cuda', got {device.type!r}")
    if inputs.type != "cpu" and device != inputs:
        raise ValueError(f"devices must be the inputs' device {inputs}, got {device}")
    return device
