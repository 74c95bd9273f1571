"""What a kernel declares of itself, in one record, and what it offers besides.

Everybody who plans or runs a call asks here, and nowhere else: ``traits_of(kernel)`` for what is
so, and ``whole_calls(kernel)`` and its like for the kernel as something with those methods. A name
that there is not is an error where the record is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, cast

import torch

from quorum_attention.counts import shown
from quorum_attention.kernels.protocol import (
    Captures,
    InnerKernel,
    Measured,
    Operator,
    Sparse,
    TaskCalls,
    WholeCalls,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """A kernel's ``traits``, of its class or of one object; a kernel without them has these.

    Attributes:
        own_attention: it computes something else than attention by query, key, scale and mask: it
            is not compared with the reference before it is believed, and gets no rows that there
            are no tokens of.
        plain_softmax: what it computes is softmax of the scores, and its backward takes ``out`` for
            delta alone; small 16-bit calls then take delta from probabilities (kernels/delta.py).
        whole_tasks: a task is one launch, whatever its rectangles: nothing to gain from several
            calls in flight, or from running all tasks of a head group as one.
        several_streams: a task is several calls, spread over ``TaskTensors.lanes`` where there are
            some: two in flight, or those of all tasks of a head group together, may be faster.
        launch_seconds: of a kernel of whole tasks, what issuing a forward, and a backward, takes
            the host.
        rates: of a forward and a backward, as shares of the best kernel's of the device.
        scaled_backward: dtypes of which it gains by a scaled backward, and undoes the scaling
            (kernels/scaling.py); none is scaled of others.
        probed_as: the kernel that is compared with the reference in the place of this one, which
            differs from it by what users have done to the scores; None: this one.
        captures: it says which tensors it reads besides (``Captures``).
        sparse: it says which pairs it keeps (``Sparse``).
        whole_calls: it takes monolithic calls on the inputs as they lie (``WholeCalls``).
        task_calls: it takes tasks on the inputs as they lie (``TaskCalls``).
        operator: it can be called for a single rectangle (``Operator``); then whole calls too.
        measured: it says of which calls ``rates`` have been measured (``Measured``).

    Raises:
        TypeError: a value of another kind.
        ValueError: numbers that make no sense, or two that do not go together.
    """

    own_attention: bool = False
    plain_softmax: bool = False
    whole_tasks: bool = False
    several_streams: bool = False
    launch_seconds: tuple[float, float] = (60e-6, 200e-6)  # the native kernel's
    rates: tuple[float, float] = (1.0, 1.0)
    scaled_backward: frozenset[torch.dtype] = field(default_factory=frozenset)
    probed_as: InnerKernel | None = None
    captures: bool = False
    sparse: bool = False
    whole_calls: bool = False
    task_calls: bool = False
    operator: bool = False
    measured: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(one.default, bool) and not isinstance(value, bool):
                raise TypeError(f"{one.name} must be True or False, got {shown(value)}")
        for name, pair in (("launch_seconds", self.launch_seconds), ("rates", self.rates)):
            numbers = isinstance(pair, tuple) and all(isinstance(n, (int, float)) for n in pair)
            if not numbers or len(pair) != 2:
                raise TypeError(f"{name} must be two numbers, got {shown(pair)}")
            if not all(0 < n < math.inf for n in pair):
                raise ValueError(f"{name} must be above 0, got {pair}")
        dtypes = self.scaled_backward
        if not isinstance(dtypes, frozenset) or not all(isinstance(d, torch.dtype) for d in dtypes):
            raise TypeError(f"scaled_backward must be a frozenset of dtypes, got {shown(dtypes)}")
        if self.whole_tasks and self.several_streams:
            raise ValueError("whole_tasks and several_streams: a task is one launch, or several")
        if self.operator and not self.whole_calls:
            raise ValueError("operator without whole_calls: an operator takes whole calls")


_OF_A_PLAIN_KERNEL = Traits()


def traits_of(kernel: InnerKernel) -> Traits:
    """What ``kernel`` declares; the defaults of one that declares nothing."""
    found: Traits = getattr(kernel, "traits", _OF_A_PLAIN_KERNEL)
    return found


def captures(kernel: InnerKernel) -> Captures | None:
    """``kernel`` as one that reads tensors of its own, if it is."""
    return cast(Captures, kernel) if traits_of(kernel).captures else None


def sparse(kernel: InnerKernel) -> Sparse | None:
    """``kernel`` as one that says which pairs it keeps, if it does."""
    return cast(Sparse, kernel) if traits_of(kernel).sparse else None


def whole_calls(kernel: InnerKernel) -> WholeCalls | None:
    """``kernel`` as one that takes monolithic calls, if it does."""
    return cast(WholeCalls, kernel) if traits_of(kernel).whole_calls else None


def task_calls(kernel: InnerKernel) -> TaskCalls | None:
    """``kernel`` as one that takes tasks on the inputs as they lie, if it does."""
    return cast(TaskCalls, kernel) if traits_of(kernel).task_calls else None


def operator(kernel: InnerKernel) -> Operator | None:
    """``kernel`` as one that can be called for a single rectangle, if it can."""
    return cast(Operator, kernel) if traits_of(kernel).operator else None


def measured(kernel: InnerKernel) -> Measured | None:
    """``kernel`` as one whose rates have been measured, if they have."""
    return cast(Measured, kernel) if traits_of(kernel).measured else None


def _methods(protocol: type) -> tuple[str, ...]:
    return tuple(name for name in vars(protocol) if not name.startswith("_"))


METHODS = MappingProxyType(
    {
        "captures": _methods(Captures),
        "sparse": _methods(Sparse),
        "whole_calls": _methods(WholeCalls),
        "task_calls": _methods(TaskCalls),
        "operator": _methods(Operator),
        "measured": _methods(Measured),
    }
)
"""What a kernel has that says so in its traits."""


def contradiction(kernel: InnerKernel) -> str | None:
    """Where a kernel's traits and the rest of it do not agree, in words; None where they do."""
    traits: Any = traits_of(kernel)
    if not isinstance(traits, Traits):
        return f"its traits must be Traits, got {shown(traits)}"
    for name, methods in METHODS.items():
        missing = [method for method in methods if not hasattr(kernel, method)]
        if getattr(traits, name) and missing:
            return f"its traits say {name}, but it lacks {', '.join(missing)}"
        if not getattr(traits, name) and not missing:
            return f"it has {', '.join(methods)}, but its traits do not say {name}=True"
    for one in fields(Traits):
        if one.name not in METHODS and hasattr(kernel, one.name):
            return f"{one.name} belongs in its traits: traits = Traits({one.name}=...)"
    return None
