"""Defaults of a program's calls: ``using``, in a context, and one layer for the whole process.

A context is Python's (``contextvars``): a thread begins without settings, an asyncio task with
those of where it was made. Layers lie in a stack, the inner ones win field by field, and each is
taken out by itself, so that blocks may end in any order.

Settings say how calls are run, never what they compute: a recomputation outside of the block (a
checkpoint's) may then have another budget, and still has the same numbers (docs/programs.md).
"""

from __future__ import annotations

import inspect
from contextlib import ContextDecorator
from contextvars import ContextVar
from enum import Enum
from functools import wraps
from typing import Any, NamedTuple

import torch

from quorum_attention.call.options import CallOptions, Device, options_of
from quorum_attention.counts import shown
from quorum_attention.execution.report import Report
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel


class _Unsaid(Enum):
    """The value of what a layer leaves as it is. (An Enum, which torch's compiler knows.)"""

    UNSAID = "as it is"


UNSAID: Any = _Unsaid.UNSAID


class Settings(NamedTuple):
    """What calls get that do not say otherwise.

    Attributes:
        budget, depth, kernel, accumulator, devices, progress: as in ``api.attention``.
        total: the report whose total calls are added to.
        sdpa: whether ``torch.nn.functional.scaled_dot_product_attention`` is taken over.
        min_tokens: calls of it with fewer tokens are not.
    """

    budget: int | str | None = None
    depth: int | str = "auto"
    kernel: str | InnerKernel = "auto"
    accumulator: str = "auto"
    devices: Device | None = None
    progress: Any = None
    total: Report | None = None
    sdpa: bool = False
    min_tokens: int = 0

    def fill(self, written: CallOptions) -> CallOptions:
        """The options of a call, with these where it says nothing. A plan says all that it pins."""
        budget, plan, depth, kernel, accumulator, devices, progress, report, _ = written
        devices = self.devices if devices is None else devices
        progress = self.progress if progress is None else progress
        if plan is None:
            budget = self.budget if budget is None else budget
            depth = self.depth if _is_auto(depth) else depth
            kernel = self.kernel if _is_auto(kernel) else kernel
            accumulator = self.accumulator if _is_auto(accumulator) else accumulator
        return CallOptions(
            budget, plan, depth, kernel, accumulator, devices, progress, report, self.total
        )


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


class Layer(NamedTuple):
    """The fields of ``Settings`` that one block sets; the others are ``UNSAID``."""

    fields: dict[str, Any]


class _Stack(NamedTuple):
    """The layers of a context, outermost first, and what they come to upon a base."""

    layers: tuple[Layer, ...]
    base: Layer | None
    whole: Settings | None

    @classmethod
    def of(cls, layers: tuple[Layer, ...], base: Layer | None) -> _Stack:
        every = (*(() if base is None else (base,)), *layers)
        if not every:
            return cls(layers, base, None)
        merged: dict[str, Any] = {}
        for layer in every:
            merged.update(layer.fields)
        return cls(layers, base, Settings(**merged))


_STACK: ContextVar[_Stack | None] = ContextVar("quorum_attention_settings", default=None)
# The whole process's. Whether there ever was a layer: most programs have none, and look no further.
_base: Layer | None = None
_any = False


def current() -> Settings | None:
    """The settings here; None where there are none."""
    stack = _STACK.get()
    if stack is None:
        if not _any:
            return None
        stack = _handed_over() or _Stack.of((), _base)
    if stack.base is not _base:
        stack = _Stack.of(stack.layers, _base)
    return stack.whole


def filled(written: CallOptions) -> CallOptions:
    """The options of a call, with the settings here where it says nothing."""
    settings = current()
    return written if settings is None else settings.fill(written)


def _handed_over() -> _Stack | None:
    """The stack of whoever called ``backward``, in a thread of autograd's own (CUDA has some): a
    checkpoint is recomputed there. torch hands Python's context over."""
    if torch._C._current_graph_task_id() < 0 or not hasattr(torch._C, "_is_key_in_tls"):
        return None
    if not torch._C._is_key_in_tls("context"):
        return None
    context = torch._C._get_obj_in_tls("context")
    found: _Stack | None = None if context is None else context.get(_STACK)
    return found


def push(layer: Layer) -> None:
    """Put a layer on top of this context's."""
    global _any
    _any = True
    stack = _STACK.get()
    _STACK.set(_Stack.of((*(() if stack is None else stack.layers), layer), _base))


def remove(layer: Layer) -> None:
    """Take a layer out of this context's, wherever it lies; nothing if it is not there (a generator
    may end in another context than it began in)."""
    stack = _STACK.get()
    layers = () if stack is None else stack.layers
    for at in reversed(range(len(layers))):
        if layers[at] is layer:
            _STACK.set(_Stack.of((*layers[:at], *layers[at + 1 :]), _base))
            return


def set_base(layer: Layer | None) -> None:
    """Replace the layer of the whole process, which lies below those of all contexts."""
    global _any, _base
    _base, _any = layer, True


def layer_of(**fields: Any) -> Layer:
    """A layer, checked, of the fields of ``Settings`` that are not ``UNSAID``.

    Raises:
        TypeError, ValueError, NotImplementedError: a value that makes no sense, by name.
    """
    said = {name: value for name, value in fields.items() if value is not UNSAID}
    options = {name: value for name, value in said.items() if name not in ("sdpa", "min_tokens")}
    options_of(CallOptions(**options, report=said.get("total")), torch.device("cpu"))
    if not _is_auto(said.get("kernel", "auto")):
        kernel = get_kernel(said["kernel"])
        if kernel.own_attention or kernel.probed_as is not None:
            raise ValueError(
                f"kernel must be one of exact attention here, got {kernel.name!r}, which computes "
                f"another: settings say how calls are run, not what they compute. Give it to the "
                f"call itself"
            )
    least = said.get("min_tokens", 0)
    if isinstance(least, bool) or not isinstance(least, int) or least < 0:
        raise ValueError(f"min_tokens must be a whole number from 0, got {shown(least)}")
    return Layer(said)


class using(ContextDecorator):  # noqa: N801 (used as a function is, as torch.no_grad)
    """Defaults for all calls within a ``with`` block, or a decorated function.

    A call's own arguments win, and so does an inner block, field by field; what a block does not
    name stays as it is outside of it. The backward of a call runs as its forward did, wherever it
    runs. Settings belong to Python's context: threads begin without them, asyncio tasks with those
    of where they were made. ``kernel`` has to be one of exact attention, since settings say how
    calls are run, never what they compute.

    Args:
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

    def __init__(
        self,
        *,
        budget: int | str | None = UNSAID,
        depth: int | str = UNSAID,
        kernel: str | InnerKernel = UNSAID,
        accumulator: str = UNSAID,
        devices: Device | None = UNSAID,
        progress: Any = UNSAID,
        report: Report | None = UNSAID,
    ) -> None:
        self._layer = layer_of(
            budget=budget, depth=depth, kernel=kernel, accumulator=accumulator, devices=devices,
            progress=progress, total=report,
        )  # fmt: skip

    def __enter__(self) -> using:
        push(self._layer)
        return self

    def __exit__(self, *error: object) -> None:
        remove(self._layer)

    def __call__(self, function: Any) -> Any:
        """``function`` within the block; of a generator or coroutine function, whatever runs of it.

        Raises:
            TypeError: an asynchronous generator: write the block into it.
        """
        if inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{type(self).__name__} cannot decorate an asynchronous generator, got "
                f"{shown(function)}: write the block into it"
            )
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def awaited(*args: Any, **named: Any) -> Any:
                with self:
                    return await function(*args, **named)

            return awaited
        if inspect.isgeneratorfunction(function):

            @wraps(function)
            def stepped(*args: Any, **named: Any) -> Any:
                return (yield from self._stepped(function(*args, **named)))

            return stepped
        return super().__call__(function)

    def _stepped(self, made: Any) -> Any:
        """A generator whose steps are within the block, and between them its caller is not."""
        step, given = made.send, None
        while True:
            try:
                with self:
                    item = step(given)
            except StopIteration as end:
                return end.value
            try:
                step, given = made.send, (yield item)
            except GeneratorExit:
                with self:
                    made.close()
                raise
            except BaseException as error:
                step, given = made.throw, error
