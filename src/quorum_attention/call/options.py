"""The options of a call that are no tensors: as its caller wrote them, and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple, TypedDict

import torch

from quorum_attention.argument_checks import one_of, shown, switch, whole_number
from quorum_attention.execution.device.lookup import (
    available_device,
    best_device,
    on_host,
)
from quorum_attention.execution.report import Report
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.keywords import names_of, unknown_option
from quorum_attention.mask import Mask
from quorum_attention.planner.options import PlannerOptions
from quorum_attention.planner.plan import Plan
from quorum_attention.units import parse_bytes

Device = str | torch.device


class DevicePool:
    """Devices that share one call: the base class of ``devices.Pool``."""


# The devices of a call, and its budget: one for all devices, or one for each.
Devices = Device | Sequence[Device] | DevicePool
Budget = float | str | Sequence[float | str]
_AUTO = "auto"


class SettingsKeywords(TypedDict, total=False):
    """Options that a call and ``using`` take by keyword; ``api.attention`` explains
    them."""

    budget: Budget | None
    depth: int | str
    kernel: str | InnerKernel
    accumulator: str
    devices: Devices | None
    progress: Any
    report: Report | None
    exact_delta: bool | None


class CallKeywords(SettingsKeywords, total=False):
    """Options that a call takes by keyword."""

    plan: Plan | None


class CallOptions(NamedTuple):
    """Options as a call's caller wrote them.

    Attributes:
        total: a report to whose total the call is added; ``using`` sets it, not the
            call.
    """

    budget: Budget | None = None
    plan: Plan | None = None
    depth: int | str = _AUTO
    kernel: str | InnerKernel = _AUTO
    accumulator: str = _AUTO
    devices: Devices | None = None
    progress: Any = None
    report: Report | None = None
    exact_delta: bool | None = None
    total: Report | None = None

    @property
    def is_default(self) -> bool:
        """Whether all options have their defaults.

        They are compared by identity: ``==`` of a caller's object may do anything.
        """
        return all(map(is_, self, DEFAULT_OPTIONS))

    @property
    def reports_with_totals(self) -> tuple[Report, ...]:
        """The reports to whose totals the call is added, each once."""
        reports = (
            (self.report,) if self.report is self.total else (self.report, self.total)
        )
        return tuple([report for report in reports if report is not None])


DEFAULT_OPTIONS = CallOptions()
_KEYWORDS = CallKeywords.__optional_keys__


def call_options(function: Callable[..., Any], keywords: CallKeywords) -> CallOptions:
    """Return the options that a call of ``function`` was given by keyword.

    Raises:
        TypeError: an option does not exist; names the one that was probably meant.
    """
    if not keywords:
        return DEFAULT_OPTIONS
    for name in keywords:
        if name not in _KEYWORDS:
            names = [*names_of(function), *sorted(_KEYWORDS)]
            raise unknown_option(function.__name__, name, names)
    options = CallOptions(**keywords)
    return DEFAULT_OPTIONS if options.is_default else options


class Arguments(NamedTuple):
    """The arguments of a call that follow query, key and value, unchecked.

    ``api.attention`` explains them.
    """

    attn_mask: torch.Tensor | Mask | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    options: CallOptions = DEFAULT_OPTIONS


def names_several(devices: Any) -> bool:
    """Tell whether the option ``devices`` names several, or may do so."""
    if isinstance(devices, str):
        return devices == "all"
    if isinstance(devices, DevicePool):
        return True
    return isinstance(devices, (list, tuple)) and len(devices) > 1


def check_options(options: CallOptions, home: torch.device) -> PlannerOptions:
    """Check the options of a call that one device computes, and return them for the
    planner.

    Args:
        home: the inputs' device.

    Raises:
        TypeError, ValueError, NotImplementedError: an option that makes no sense, by
            name.
    """
    _check_class("plan", options.plan, Plan)
    _check_class("report", options.report, Report)
    _check_exact_delta(options.exact_delta)
    depth = checked_depth(options.depth)
    budget = options.budget
    if isinstance(budget, (list, tuple)):
        raise ValueError(
            "budget must be one number of bytes where one device computes, got "
            f"{shown(budget)}"
        )
    plan = options.plan
    if plan is not None and depth is not None:
        raise ValueError(
            "plan and depth cannot both be given: a plan pins its own depth"
        )
    _check_progress(options.progress)
    accumulator = one_of(options.accumulator, "accumulator", ("auto", "device", "host"))
    kernel = options.kernel
    if plan is not None and kernel == "auto":
        kernel = plan.kernel
    shows_progress = options.progress is not None and options.progress is not False
    return PlannerOptions(
        budget_bytes=None if budget is None else parse_bytes(budget),
        plan=plan,
        depth=depth,
        kernel=kernel,
        accumulator=None if accumulator == "auto" else accumulator,
        device=_compute_device(home, options.devices),
        watched=options.report is not None or shows_progress,
    )


def _check_progress(progress: Any) -> None:
    """Raise TypeError unless ``progress`` is a bool, a function or None."""
    if progress is None or isinstance(progress, bool) or callable(progress):
        return
    allowed = "None, True or a callable (done, total, label)"
    raise TypeError(f"progress must be {allowed}, got {shown(progress)}")


def _check_exact_delta(exact_delta: object) -> None:
    """Raise TypeError unless ``exact_delta`` is a bool or None."""
    if exact_delta is not None:
        switch(exact_delta, "exact_delta")


def _check_class(name: str, value: object, kind: type) -> None:
    """Raise TypeError unless an option is None or of a class."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"{name} must be a quorum_attention.{kind.__name__}, got {shown(value)}"
        )


def checked_depth(depth: int | str) -> int | None:
    """Return the number of levels; None leaves it to the planner.

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


def _compute_device(home: torch.device, devices: Devices | None) -> torch.device:
    """Return the device that computes a call whose inputs are on ``home``.

    Raises:
        TypeError, ValueError, NotImplementedError: ``devices`` names no device that can
            be used.
    """
    if devices is None:
        return best_device() if on_host(home) else home
    names = [devices] if isinstance(devices, (str, torch.device)) else devices
    if not isinstance(names, (list, tuple)):
        raise TypeError(
            f"devices must be None, a device or a list of one, got {shown(devices)}"
        )
    if len(names) != 1:
        raise NotImplementedError(
            f"devices must name one device, got {len(names)}; several are taken by "
            "attention, attention_with_lse and attention_backward"
        )
    device = available_device(names[0], "devices")
    if not on_host(home) and device != home:
        raise ValueError(f"devices must be the inputs' device {home}, got {device}")
    return device
