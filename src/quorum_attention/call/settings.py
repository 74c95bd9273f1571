"""Settings: what fills in the options that calls leave open. ``using`` sets them in a
context.

A context is Python's (``contextvars``): a thread begins without settings, an asyncio
task with those of where it was made. A context has a tuple of layers. The inner ones
win field by field, and each is taken out by itself, so that blocks may end in any
order. One more layer holds for the whole process and lies below all others.

Settings say how calls are run, never what they compute: a recomputation outside of the
block (a checkpoint's) may then have another budget, and still has the same numbers
(docs/programs.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._contextlib import context_decorator

from quorum_attention.argument_checks import shown, whole_number
from quorum_attention.call.options import (
    Arguments,
    CallOptions,
    SettingsKeywords,
    check_options,
)
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.keywords import check_names, names_of
from quorum_attention.units import check_budget

if TYPE_CHECKING:
    from typing_extensions import Unpack

Settings = dict[str, Any]
"""Options by name; besides ``total``, the report to whose total calls are added, and
``sdpa``, whether torch's own function is taken over, for calls of at least
``min_tokens``."""

# Shorter calls of torch's own functions stay torch's, unless a block says otherwise.
MIN_TOKENS = 4096

_PINNED_BY_PLAN = ("budget", "depth", "kernel", "accumulator")
_FREE = ("devices", "progress", "exact_delta")

# The layers of a context, outermost first.
_LAYERS: ContextVar[tuple[Settings, ...]] = ContextVar(
    "quorum_attention_settings", default=()
)
_of_process: Settings | None = None


def current_settings() -> Settings | None:
    """Return the settings that hold here, of all layers together; None where there are
    none."""
    layers = _LAYERS.get() or _layers_of_backward()
    if _of_process is not None:
        layers = (_of_process, *layers)
    if not layers:
        return None
    return {name: value for layer in layers for name, value in layer.items()}


def _layers_of_backward() -> tuple[Settings, ...]:
    """Return the layers of the caller of ``backward``, in a thread of autograd's own.

    With CUDA there are such threads, and checkpoints are recomputed there. torch hands
    Python's context over.
    """
    if torch._C._current_graph_task_id() < 0 or not torch._C._is_key_in_tls("context"):
        return ()
    context = torch._C._get_obj_in_tls("context")
    layers: tuple[Settings, ...] = () if context is None else context.get(_LAYERS, ())
    return layers


def with_current_settings(options: CallOptions) -> CallOptions:
    """Fill in the options that a call leaves open by the settings that hold here."""
    return with_settings(current_settings(), options)


def with_settings(settings: Settings | None, options: CallOptions) -> CallOptions:
    """Fill in the options that a call leaves open by ``settings``."""
    if settings is None:
        return options
    names = _FREE if options.plan is not None else (*_PINNED_BY_PLAN, *_FREE)
    changes = {
        name: settings[name]
        for name in names
        if name in settings and _is_open(getattr(options, name))
    }
    return options._replace(**changes, total=settings.get("total"))


def _is_open(value: object) -> bool:
    """Tell whether an option has its default."""
    return value is None or (isinstance(value, str) and value == "auto")


def set_process_settings(settings: Settings | None) -> Settings | None:
    """Replace the layer of the whole process; returns the former one."""
    global _of_process
    former = _of_process
    _of_process = settings
    return former


def checked_settings(
    function: Callable[..., Any], options: SettingsKeywords, **patch: Any
) -> Settings:
    """Return a layer, checked: the options of ``SettingsKeywords``, and ``patch``.

    Args:
        function: what was given these options by keyword. An error lists the names
            that it takes.
        patch: ``sdpa`` and ``min_tokens``, of functions that patch torch.

    Raises:
        TypeError, ValueError, NotImplementedError: a value that makes no sense, by
            name.
    """
    for name in options:
        if name in Arguments._fields or name == "plan":
            raise TypeError(
                f"{name} is no option of settings; give it to the call itself"
            )
    known_names = SettingsKeywords.__optional_keys__
    if not options.keys() <= known_names:
        names = [*names_of(function), *sorted(known_names)]
        check_names(function.__name__, options, names)
    check_options(CallOptions(**options), torch.device("cpu"))
    check_budget(options.get("budget"))
    kernel = options.get("kernel")
    if not _is_open(kernel):
        _check_exact(kernel)
    whole_number(patch.get("min_tokens", 0), "min_tokens", 0)
    settings: Settings = {**patch, **options}
    if "report" in settings:
        settings["total"] = settings.pop("report")
    return settings


def _check_exact(kernel: Any) -> None:
    """Raise ValueError for a kernel of another attention than the exact one."""
    kernel = get_kernel(kernel)
    if not kernel.is_exact:
        raise ValueError(
            f"kernel must be one of exact attention here, got {kernel.name!r}: "
            "settings say how calls are run, not what they compute. Give it to the "
            "call itself"
        )


class using:  # noqa: N801 (used as a function is, as torch.no_grad)
    """Defaults for all calls within a ``with`` block, or a decorated function.

    A call's own arguments win over blocks, and an inner block over an outer one. A
    field that a block does not name keeps its outer value. The backward of a call has
    the settings of its forward. Settings are context variables: a new thread begins
    without them, an asyncio task inherits them. ``kernel`` must compute plain
    attention, because settings say how calls run, not what they compute.

    ``budget``, ``depth``, ``kernel``, ``accumulator``, ``progress`` and ``exact_delta``
    are those of ``quorum_attention.attention``. None and "auto", the defaults of these
    arguments, undo what an outer block set.

    Keyword Args:
        devices: one device, or None.
        report: a ``Report``. Its ``total`` counts every pass of these calls. Memory and
            stages are measured only for a ``report`` that a call gets as its argument.

    Raises:
        TypeError, ValueError, NotImplementedError: a value that makes no sense, by
            name.
        RuntimeError: a block is left that is not open.

    Examples:
        >>> report = qa.Report()
        >>> q = torch.randn(1, 2, 300, 16)
        >>> with qa.using(budget="16MiB", report=report):
        ...     first, second = (qa.attention(q, q, q) for _ in range(2))
        >>> report.total.forwards
        2
    """

    def __init__(self, **options: Unpack[SettingsKeywords]) -> None:
        self._set_layer(checked_settings(using, options))

    def _set_layer(self, layer: Settings) -> None:
        self._layer = layer
        # One entry for each time that the block is open. Threads may share a block, and
        # no other thread comes between the steps of ``append`` and ``pop``.
        self._openings: list[None] = []

    def __enter__(self) -> using:
        self._openings.append(None)
        _LAYERS.set((*_LAYERS.get(), self._layer))
        return self

    def __exit__(self, *error: object) -> None:
        """Take the layer out of this context, wherever it lies.

        It may not be there: a generator may end in another context than it began in.

        Raises:
            RuntimeError: the block is not open in any context.
        """
        try:
            self._openings.pop()
        except IndexError:
            raise RuntimeError(
                f"this block of {type(self).__name__} is not open: it was left "
                "already, or never entered"
            ) from None
        layers = _LAYERS.get()
        for index in reversed(range(len(layers))):
            if layers[index] is self._layer:
                _LAYERS.set((*layers[:index], *layers[index + 1 :]))
                return

    def __call__(self, function: Any) -> Any:
        """Return ``function`` within the block; a generator function runs within it
        step by step.

        Raises:
            TypeError: an asynchronous function: write the block into it.
        """
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(
            function
        ):
            raise TypeError(
                f"{type(self).__name__} cannot decorate an asynchronous function, got "
                f"{shown(function)}: write the block into it"
            )
        return context_decorator(lambda: self, function)
