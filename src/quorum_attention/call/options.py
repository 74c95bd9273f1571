"""The options of a call that are no tensors: as its caller wrote them, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch

from quorum_attention.counts import one_of, shown, whole_number
from quorum_attention.execution.device.lookup import best_device, on_host, present
from quorum_attention.execution.report import Report
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.mask import Mask
from quorum_attention.planner.plan import Options, Plan
from quorum_attention.sizes import parse_bytes

Device = str | torch.device


class Several:
    """Devices that share one call: a ``pool.Pool``."""


# What may name the devices of a call, and its budget: one for all devices or one for each.
Devices = Device | Sequence[Device] | Several
Budget = float | str | Sequence[float | str]
_AUTO = "auto"


class Defaults(TypedDict, total=False):
    """Options that a call and ``using`` take by keyword; ``api.attention`` says what they mean."""

    budget: Budget | None
    depth: int | str
    kernel: str | InnerKernel
    accumulator: str
    devices: Devices | None
    progress: Any
    report: Report | None


class RunOptions(Defaults, total=False):
    """Options that a call takes by keyword."""

    plan: Plan | None


class CallOptions(NamedTuple):
    """Options as a call's caller wrote them.

    Attributes:
        total: a report to whose total the call is added; of ``settings.using``, not of the call.
    """

    budget: Budget | None = None
    plan: Plan | None = None
    depth: int | str = _AUTO
    kernel: str | InnerKernel = _AUTO
    accumulator: str = _AUTO
    devices: Devices | None = None
    progress: Any = None
    report: Report | None = None
    total: Report | None = None

    @property
    def says_nothing(self) -> bool:
        """Whether all options of the call have their defaults. Compared by identity: ``==`` of a
        caller's object may do anything."""
        return False not in [a is b for a, b in zip(self, _DEFAULTS, strict=True)]

    @property
    def sums(self) -> tuple[Report, ...]:
        """The reports to whose totals the call is added, each once."""
        both = (self.report,) if self.report is self.total else (self.report, self.total)
        return tuple([report for report in both if report is not None])


_DEFAULTS = CallOptions()


class Arguments(NamedTuple):
    """The arguments of a call that follow query, key and value, unchecked; ``api.attention`` says
    what they mean."""

    attn_mask: torch.Tensor | Mask | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    written: CallOptions = _DEFAULTS


def several(devices: Any) -> bool:
    """Whether ``devices`` of a call says that several compute it, or may say so."""
    if isinstance(devices, str):
        return devices == "all"
    return isinstance(devices, Several) or (isinstance(devices, (list, tuple)) and len(devices) > 1)


def options_of(written: CallOptions, home: torch.device) -> Options:
    """The options of a call.

    Args:
        home: the inputs' device.

    Raises:
        TypeError, ValueError, NotImplementedError: an option that makes no sense, by name.
    """
    budget, plan, depth, kernel, accumulator, devices, progress, report, _ = written
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan must come from quorum_attention.plan, got {type(plan).__name__}")
    levels = depth_of(depth)
    if isinstance(budget, (list, tuple)):
        raise ValueError(
            f"budget must be one number of bytes where one device computes, got {shown(budget)}"
        )
    if plan is not None and levels is not None:
        raise ValueError("plan and depth cannot both be given: a plan pins its own depth")
    if report is not None and not isinstance(report, Report):
        raise TypeError(f"report must be a quorum_attention.Report, got {type(report).__name__}")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(
            f"progress must be None, True or a callable (done, total, label), "
            f"got {type(progress).__name__}"
        )
    where = one_of(accumulator, "accumulator", ("auto", "device", "host"))
    return Options(
        budget_bytes=None if budget is None else parse_bytes(budget),
        plan=plan,
        depth=levels,
        kernel=kernel if plan is None or kernel != "auto" else plan.kernel,
        accumulator=None if where == "auto" else where,
        device=compute_device(home, devices),
        watched=report is not None or (progress is not None and progress is not False),
    )


def depth_of(depth: int | str) -> int | None:
    """Levels; None leaves them to the planner.

    Raises:
        ValueError: neither "auto" nor a number from 0.
    """
    if isinstance(depth, str) and depth == "auto":
        return None
    try:
        return whole_number(depth, "depth", 0)
    except (TypeError, ValueError):
        raise ValueError(
            f"depth must be 'auto' or a whole number from 0, got {shown(depth)}"
        ) from None


def compute_device(inputs: torch.device, devices: Devices | None) -> torch.device:
    """The device that computes a call whose inputs are on ``inputs``.

    Raises:
        TypeError, ValueError, NotImplementedError: ``devices`` names no device that can be used.
    """
    if devices is None:
        return best_device() if on_host(inputs) else inputs
    chosen = [devices] if isinstance(devices, (str, torch.device)) else devices
    if not isinstance(chosen, (list, tuple)):
        raise TypeError(f"devices must be None, a device or a list of one, got {shown(devices)}")
    if len(chosen) != 1:
        raise NotImplementedError(
            f"devices must name one device, got {len(chosen)}; several are taken by attention, "
            "attention_with_lse and attention_backward"
        )
    device = present(chosen[0], "devices")
    if not on_host(inputs) and device != inputs:
        raise ValueError(f"devices must be the inputs' device {inputs}, got {device}")
    return device
