"""What of a call is not a tensor: checked, with every default settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from quorum_attention.counts import one_of, real_number, shown, switch, whole_number
from quorum_attention.execution.device.lookup import best_device, on_host, present
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
    levels = _depth(depth)
    if plan is not None and levels is not None:
        raise ValueError("plan and depth cannot both be given: a plan pins its own depth")
    if report is not None and not isinstance(report, Report):
        raise TypeError(f"report must be a quorum_attention.Report, got {type(report).__name__}")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(
            f"progress must be None, True or a callable (done, total, label), "
            f"got {type(progress).__name__}"
        )
    home = one_of(accumulator, "accumulator", ("auto", "device", "host"))
    return Options(
        scale=query.shape[-1] ** -0.5 if scale is None else real_number(scale, "scale"),
        attn_mask=attn_mask,
        is_causal=switch(is_causal, "is_causal"),
        enable_gqa=switch(enable_gqa, "enable_gqa"),
        budget_bytes=None if budget is None else parse_bytes(budget),
        plan=plan,
        depth=levels,
        kernel=kernel if plan is None or kernel != "auto" else plan.kernel,
        accumulator=None if home == "auto" else home,
        device=compute_device(query.device, devices),
        progress=progress,
        report=report,
    )


def _depth(depth: int | str) -> int | None:
    if isinstance(depth, str) and depth == "auto":
        return None
    try:
        return whole_number(depth, "depth", 0)
    except (TypeError, ValueError):
        raise ValueError(
            f"depth must be 'auto' or a whole number from 0, got {shown(depth)}"
        ) from None


def compute_device(inputs: torch.device, devices: Device | Sequence[Device] | None) -> torch.device:
    """Where a call computes.

    Raises:
        TypeError, ValueError, NotImplementedError: ``devices`` names none that can be used here.
    """
    if devices is None:
        return best_device() if on_host(inputs) else inputs
    chosen = [devices] if isinstance(devices, (str, torch.device)) else devices
    if not isinstance(chosen, (list, tuple)):
        raise TypeError(f"devices must be None, a device or a list of one, got {shown(devices)}")
    if len(chosen) != 1:
        raise NotImplementedError(
            f"devices must name one device, got {len(chosen)}; several are not supported yet"
        )
    device = present(chosen[0], "devices")
    if not on_host(inputs) and device != inputs:
        raise ValueError(f"devices must be the inputs' device {inputs}, got {device}")
    return device
