"""Defaults of a program's calls: ``using``, in a context, and one layer for the whole process.

A context is Python's (``contextvars``): a thread begins without settings, an asyncio task with
those of where it was made. It has a tuple of layers; the inner ones win field by field, and each is
taken out by itself, so that blocks may end in any order.

Settings say how calls are run, never what they compute: a recomputation outside of the block (a
checkpoint's) may then have another budget, and still has the same numbers (docs/programs.md).
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._contextlib import context_decorator

from quorum_attention.call.options import CallOptions, Defaults, options_of
from quorum_attention.counts import shown, whole_number
from quorum_attention.kernels.registry import get_kernel

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What calls get that do not say otherwise: options; ``total``, the report to whose total they are
# added; ``sdpa``, whether torch's own function is taken over, for calls of at least ``min_tokens``.
Layer = dict[str, Any]
# What a plan pins, and what it does not.
_PINNED, _FREE = ("budget", "depth", "kernel", "accumulator"), ("devices", "progress")


def _is_default(value: object) -> bool:
    return value is None or (isinstance(value, str) and value == "auto")


# Those of a context, outermost first, and the whole process's below them.
_LAYERS: ContextVar[tuple[Layer, ...]] = ContextVar("quorum_attention_settings", default=())
_base: Layer | None = None


def current() -> Layer | None:
    """The settings here, of all layers; None where there are none."""
    layers = _LAYERS.get() or _handed_over()
    if _base is not None:
        layers = (_base, *layers)
    if not layers:
        return None
    return {name: value for layer in layers for name, value in layer.items()}


def filled(written: CallOptions) -> CallOptions:
    """The options of a call, with the settings here where it says nothing."""
    return fill(current(), written)


def fill(settings: Layer | None, written: CallOptions) -> CallOptions:
    """The options of a call, with ``settings`` where it says nothing."""
    if settings is None:
        return written
    free = _FREE if written.plan is not None else (*_PINNED, *_FREE)
    mine = {n: settings[n] for n in free if n in settings and _is_default(getattr(written, n))}
    return written._replace(**mine, total=settings.get("total"))


def _handed_over() -> tuple[Layer, ...]:
    """The layers of whoever called ``backward``, in a thread of autograd's own (CUDA has some): a
    checkpoint is recomputed there. torch hands Python's context over."""
    if torch._C._current_graph_task_id() < 0 or not torch._C._is_key_in_tls("context"):
        return ()
    context = torch._C._get_obj_in_tls("context")
    found: tuple[Layer, ...] = () if context is None else context.get(_LAYERS, ())
    return found


def set_base(layer: Layer | None) -> Layer | None:
    """Replace the layer of the whole process, which lies below those of all contexts; returns what
    it was."""
    global _base
    before, _base = _base, layer
    return before


def layer_of(**fields: Any) -> Layer:
    """A layer, checked: options as ``Defaults`` has them, ``sdpa`` and ``min_tokens``.

    Raises:
        TypeError, ValueError, NotImplementedError: a value that makes no sense, by name.
    """
    options = {name: value for name, value in fields.items() if name not in ("sdpa", "min_tokens")}
    for name in options:
        if name not in Defaults.__optional_keys__:
            raise TypeError(f"{name} is no option of settings; give it to the call itself")
    options_of(CallOptions(**options), torch.device("cpu"))
    if not _is_default(fields.get("kernel")):
        kernel = get_kernel(fields["kernel"])
        if kernel.own_attention or kernel.probed_as is not None:
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

    A call's own arguments win, and so does an inner block, field by field; what a block does not
    name stays as it is outside of it. The backward of a call runs as its forward did, wherever it
    runs. Settings belong to Python's context: threads begin without them, asyncio tasks with those
    of where they were made. ``kernel`` has to be one of exact attention, since settings say how
    calls are run, never what they compute.

    Options:
        budget, depth, kernel, accumulator, progress: as in ``quorum_attention.attention``; their
            defaults there (None, "auto") undo an outer block's.
        devices: one device, or None.
        report: a ``Report``, to whose ``total`` every pass of these calls is added. That costs
            next to nothing: neither memory nor stages are measured, as for a call's own ``report``.

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

    def __init__(self, **options: Unpack[Defaults]) -> None:
        self._layer = layer_of(**options)

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
