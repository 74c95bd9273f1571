"""The options of a call that are no tensors: as its caller wrote them, checked, and their defaults:
``using``, in a context, and one layer for the whole process.

A context is Python's (``contextvars``): a thread begins without settings, an asyncio task with
those of where it was made. It has a tuple of layers; the inner ones win field by field, and each is
taken out by itself, so that blocks may end in any order.

Settings say how calls are run, never what they compute: a recomputation outside of the block (a
checkpoint's) may then have another budget, and still has the same numbers (docs/programs.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch.utils._contextlib import context_decorator

from quorum_attention.argument_checks import one_of, shown, whole_number
from quorum_attention.execution.device.lookup import available_device, best_device, on_host
from quorum_attention.execution.report import Report
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.keywords import check_names, names_of, unknown_option
from quorum_attention.mask import Mask
from quorum_attention.planner.options import PlannerOptions
from quorum_attention.planner.plan import Plan
from quorum_attention.units import parse_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

Device = str | torch.device


class DevicePool:
    """Devices that share one call: a ``pool.Pool``."""


# What may name the devices of a call, and its budget: one for all devices or one for each.
Devices = Device | Sequence[Device] | DevicePool
Budget = float | str | Sequence[float | str]
_AUTO = "auto"


class SettingsKeywords(TypedDict, total=False):
    """Options that a call and ``using`` take by keyword; ``api.attention`` says what they mean."""

    budget: Budget | None
    depth: int | str
    kernel: str | InnerKernel
    accumulator: str
    devices: Devices | None
    progress: Any
    report: Report | None


class CallKeywords(SettingsKeywords, total=False):
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
    def is_default(self) -> bool:
        """Whether all options of the call have their defaults. Compared by identity: ``==`` of a
        caller's object may do anything."""
        return all(map(is_, self, _DEFAULTS))

    @property
    def sums(self) -> tuple[Report, ...]:
        """The reports to whose totals the call is added, each once."""
        both = (self.report,) if self.report is self.total else (self.report, self.total)
        return tuple([report for report in both if report is not None])


_DEFAULTS = CallOptions()
_NAMES = CallKeywords.__optional_keys__


def call_options(function: Callable[..., Any], options: CallKeywords) -> CallOptions:
    """The options that a call of ``function`` was given by keyword.

    Raises:
        TypeError: one that does not exist; names what was probably meant.
    """
    if not options:
        return _DEFAULTS
    for name in options:
        if name not in _NAMES:
            raise unknown_option(function.__name__, name, [*names_of(function), *sorted(_NAMES)])
    return CallOptions(**options)


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
    options: CallOptions = _DEFAULTS


def names_several(devices: Any) -> bool:
    """Whether ``devices`` of a call says that several compute it, or may say so."""
    if isinstance(devices, str):
        return devices == "all"
    return isinstance(devices, DevicePool) or (
        isinstance(devices, (list, tuple)) and len(devices) > 1
    )


def options_of(options: CallOptions, home: torch.device) -> PlannerOptions:
    """The options of a call.

    Args:
        home: the inputs' device.

    Raises:
        TypeError, ValueError, NotImplementedError: an option that makes no sense, by name.
    """
    budget, plan, depth, kernel, accumulator, devices, progress, report, _ = options
    for name, value, kind in (("plan", plan, Plan), ("report", report, Report)):
        if not (value is None or isinstance(value, kind)):
            raise TypeError(
                f"{name} must be a quorum_attention.{kind.__name__}, got {shown(value)}"
            )
    levels = depth_of(depth)
    if isinstance(budget, (list, tuple)):
        raise ValueError(
            f"budget must be one number of bytes where one device computes, got {shown(budget)}"
        )
    if plan is not None and levels is not None:
        raise ValueError("plan and depth cannot both be given: a plan pins its own depth")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        allowed = "None, True or a callable (done, total, label)"
        raise TypeError(f"progress must be {allowed}, got {shown(progress)}")
    where = one_of(accumulator, "accumulator", ("auto", "device", "host"))
    return PlannerOptions(
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
    device = available_device(chosen[0], "devices")
    if not on_host(inputs) and device != inputs:
        raise ValueError(f"devices must be the inputs' device {inputs}, got {device}")
    return device


# --- Defaults: settings of a context -------------------------------------------------------------

# What calls get that do not say otherwise: options; ``total``, the report to whose total they are
# added; ``sdpa``, whether torch's own function is taken over, for calls of at least ``min_tokens``.
Settings = dict[str, Any]
# What a plan pins, and what it does not.
_PINNED, _FREE = ("budget", "depth", "kernel", "accumulator"), ("devices", "progress")


def _is_default(value: object) -> bool:
    return value is None or (isinstance(value, str) and value == "auto")


# Those of a context, outermost first, and the whole process's below them.
_LAYERS: ContextVar[tuple[Settings, ...]] = ContextVar("quorum_attention_settings", default=())
_base: Settings | None = None


def current_settings() -> Settings | None:
    """The settings here, of all layers; None where there are none."""
    layers = _LAYERS.get() or _settings_of_backward()
    if _base is not None:
        layers = (_base, *layers)
    if not layers:
        return None
    return {name: value for layer in layers for name, value in layer.items()}


def with_current_settings(options: CallOptions) -> CallOptions:
    """The options of a call, with the settings here where it says nothing."""
    return with_settings(current_settings(), options)


def with_settings(settings: Settings | None, options: CallOptions) -> CallOptions:
    """The options of a call, with ``settings`` where it says nothing."""
    if settings is None:
        return options
    free = _FREE if options.plan is not None else (*_PINNED, *_FREE)
    mine = {n: settings[n] for n in free if n in settings and _is_default(getattr(options, n))}
    return options._replace(**mine, total=settings.get("total"))


def _settings_of_backward() -> tuple[Settings, ...]:
    """The layers of whoever called ``backward``, in a thread of autograd's own (CUDA has some): a
    checkpoint is recomputed there. torch hands Python's context over."""
    if torch._C._current_graph_task_id() < 0 or not torch._C._is_key_in_tls("context"):
        return ()
    context = torch._C._get_obj_in_tls("context")
    found: tuple[Settings, ...] = () if context is None else context.get(_LAYERS, ())
    return found


def set_process_settings(layer: Settings | None) -> Settings | None:
    """Replace the layer of the whole process, which lies below those of all contexts; returns what
    it was."""
    global _base
    before, _base = _base, layer
    return before


def checked_settings(function: str, /, **fields: Any) -> Settings:
    """A layer, checked: options as ``SettingsKeywords`` has them, ``sdpa`` and ``min_tokens``.

    Args:
        function: the name of the function that was given these options.

    Raises:
        TypeError, ValueError, NotImplementedError: a value that makes no sense, by name.
    """
    options = {name: value for name, value in fields.items() if name not in ("sdpa", "min_tokens")}
    for name in options:
        if name in Arguments._fields or name == "plan":
            raise TypeError(f"{name} is no option of settings; give it to the call itself")
    check_names(function, options, sorted(SettingsKeywords.__optional_keys__))
    options_of(CallOptions(**options), torch.device("cpu"))
    if not _is_default(fields.get("kernel")):
        kernel = get_kernel(fields["kernel"])
        if kernel.own_attention or kernel.plain_variant is not None:
            raise ValueError(
                f"kernel must be one of exact attention here, got {kernel.name!r}: settings say "
                f"how calls are run, not what they compute. Give it to the call itself"
            )
    whole_number(fields.get("min_tokens", 0), "min_tokens", 0)
    if "report" in fields:
        fields["total"] = fields.pop("report")
    return fields


class using:  # noqa: N801 (used as a function is, as torch.no_grad)
    """Defaults for all calls within a ``with`` block, or a decorated function.

    A call's own arguments win, then the inner block, field by field. A field that a block does not
    name keeps its outer value. The backward of a call has the settings of its forward. Settings are
    context variables: a new thread begins without them, an asyncio task inherits them. ``kernel``
    must compute plain attention: settings say how calls are run, never what they compute.

    Options:
        budget, depth, kernel, accumulator, progress: as in ``quorum_attention.attention``; their
            defaults there (None, "auto") undo an outer block's.
        devices: one device, or None.
        report: a ``Report``, to whose ``total`` every pass of these calls is added. Memory and
            stages are measured only for a call's own ``report``.

    Raises:
        TypeError, ValueError, NotImplementedError: a value that makes no sense, by name.

    Examples:
        >>> report = qa.Report()
        >>> q = torch.randn(1, 2, 300, 16)
        >>> with qa.using(budget="16MiB", report=report):
        ...     first, second = (qa.attention(q, q, q) for _ in range(2))
        >>> report.total.forwards
        2
    """

    def __init__(self, **options: Unpack[SettingsKeywords]) -> None:
        self._layer = checked_settings("using", **options)

    def __enter__(self) -> using:
        _LAYERS.set((*_LAYERS.get(), self._layer))
        return self

    def __exit__(self, *error: object) -> None:
        """Take the layer out of this context's, wherever it lies; nothing if it is not there (a
        generator may end in another context than it began in)."""
        layers = _LAYERS.get()
        for at in reversed(range(len(layers))):
            if layers[at] is self._layer:
                _LAYERS.set((*layers[:at], *layers[at + 1 :]))
                return

    def __call__(self, function: Any) -> Any:
        """``function`` within the block; of a generator function, whatever runs of it.

        Raises:
            TypeError: an asynchronous function: write the block into it.
        """
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{type(self).__name__} cannot decorate an asynchronous function, got "
                f"{shown(function)}: write the block into it"
            )
        return context_decorator(lambda: self, function)
