"""What a kernel declares about itself, in one record, and which optional methods it has.

Planner and executor ask here and nowhere else: ``traits_of(kernel)`` returns the record, and
``whole_calls(kernel)`` and its like return the kernel with the type of that protocol, or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, cast

import torch

from quorum_attention.counts import shown
from quorum_attention.kernels.protocol import (
    ByEntry,
    CallsBack,
    CallShape,
    Captures,
    InnerKernel,
    Measured,
    Operator,
    Pairwise,
    Recorded,
    RowStatistics,
    Sparse,
    TaskCalls,
    WholeCalls,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The ``traits`` of a kernel class or of one kernel; a kernel without them has these defaults.

    Attributes:
        own_attention: it computes other attention than that of query, key, scale and mask. So it is
            not compared with the reference first, and gets no rows beyond the sequence's tokens.
        position_free: that other attention depends on no positions, heads or batch entries, so that
            parts of a call can be computed as calls of their own.
        plain_softmax: it computes the softmax of the scores, and its backward uses ``out`` for
            delta alone; small 16-bit calls then get a more exact delta (kernels/delta.py).
        small_gradients: where it runs, the gradients of those small calls come quicker from
            materialised scores (kernels/small_gradients.py), and of longer 16-bit ones from its own
            calls in fp32 (kernels/widened.py); needs ``plain_softmax``.
        whole_tasks: a task is one launch, whatever its rectangles. So nothing is gained by several
            calls in flight, or by running all tasks of a head group together.
        several_streams: a task is several calls, spread over ``TaskTensors.lanes`` if there are
            any. Two calls in flight, or all tasks of a head group together, may be faster.
        launch_seconds: host seconds to launch a forward, and a backward, of a kernel of whole
            tasks.
        building_seconds: what a first forward, and a first backward, of a kind take more in a new
            process, while this kernel is compiled; 0: it has not to be.
        rebuilding_seconds: the same where an earlier process has left what it compiled on disk.
        rates: speeds of its forward and its backward, as shares of the device's best kernel's.
        pace: ``pace(machine, head_dim, backward)`` is a ``planner.machine.Machine`` with the rates
            that this kernel reaches on it; None: they are the device's, by ``rates``.
        scaled_backward: dtypes for which a scaled backward is more exact; it undoes the scaling
            (kernels/scaling.py). Backwards in other dtypes are not scaled, nor those with dropout.
        wide_products: its backward may be handed an fp16 upstream gradient of up to 2**15: what it
            multiplies that by is in fp32, or scaled by the kernel itself, and cannot overflow. A
            gradient of a wider dtype then keeps more of its small numbers (execution/job.py).
        dropout: it drops probabilities by position, as ``TaskTensors.dropout`` says
            (kernels/dropout.py). Others are not asked to run a call with dropout.
        probed_as: the kernel to compare with the reference instead of this one, because this one
            has options that change the scores; None: this one.
        captures: it says which tensors it reads besides (``Captures``).
        calls_back: it says which functions of the user's its backward calls again
            (``CallsBack``).
        row_statistics: it can compute a few rows alone (``RowStatistics``).
        by_entry: it says whether it depends on the batch entry's number (``ByEntry``).
        sparse: it says which pairs it keeps (``Sparse``).
        pairwise: it says how it changes each score (``Pairwise``).
        whole_calls: it takes monolithic calls on the inputs as they lie (``WholeCalls``).
        task_calls: it takes tasks on the inputs as they lie (``TaskCalls``).
        any_upstream: upstream gradient and output of its ``backward`` may have any dtype and
            strides; it copies what an operator cannot read, for one operator call at a time.
        heads_by_thread: on a CPU each thread computes whole heads of batch entries in the backward
            of an uncut call, and an equal part of all rows in its forward.
        operator: it can be called for a single rectangle (``Operator``); needs ``whole_calls``.
        measured: it says for which calls its ``rates`` have been measured (``Measured``).
        empty_rows: its backward takes an lse of -inf, which rows without keys have.
        recorded: torch's autograd can record small calls of it (``Recorded``).

    Raises:
        TypeError: a value of the wrong type.
        ValueError: numbers that make no sense, or two values that exclude each other.
    """

    own_attention: bool = False
    position_free: bool = False
    plain_softmax: bool = False
    small_gradients: bool = False
    whole_tasks: bool = False
    several_streams: bool = False
    launch_seconds: tuple[float, float] = (60e-6, 200e-6)  # the native kernel's
    building_seconds: tuple[float, float] = (0.0, 0.0)
    rebuilding_seconds: tuple[float, float] = (0.0, 0.0)
    rates: tuple[float, float] = (1.0, 1.0)
    pace: Callable[..., Any] | None = None
    scaled_backward: frozenset[torch.dtype] = field(default_factory=frozenset)
    wide_products: bool = False
    dropout: bool = False
    probed_as: InnerKernel | None = None
    captures: bool = False
    calls_back: bool = False
    row_statistics: bool = False
    by_entry: bool = False
    sparse: bool = False
    pairwise: bool = False
    whole_calls: bool = False
    task_calls: bool = False
    any_upstream: bool = False
    heads_by_thread: bool = False
    operator: bool = False
    measured: bool = False
    empty_rows: bool = False
    recorded: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(one.default, bool) and not isinstance(value, bool):
                raise TypeError(f"{one.name} must be True or False, got {shown(value)}")
        for name, none in (
            ("launch_seconds", False), ("rates", False), ("building_seconds", True),
            ("rebuilding_seconds", True),
        ):  # fmt: skip
            pair = getattr(self, name)
            numbers = isinstance(pair, tuple) and all(isinstance(n, (int, float)) for n in pair)
            if not numbers or len(pair) != 2:
                raise TypeError(f"{name} must be two numbers, got {shown(pair)}")
            if not all(0 <= n < math.inf and (none or n) for n in pair):
                least = "0 or more" if none else "above 0"
                raise ValueError(f"{name} must be {least}, got {pair}")
        dtypes = self.scaled_backward
        if not isinstance(dtypes, frozenset) or not all(isinstance(d, torch.dtype) for d in dtypes):
            raise TypeError(f"scaled_backward must be a frozenset of dtypes, got {shown(dtypes)}")
        if self.whole_tasks and self.several_streams:
            raise ValueError("whole_tasks and several_streams: a task is one launch, or several")
        if self.small_gradients and not self.plain_softmax:
            raise ValueError("small_gradients without plain_softmax: they are those of a softmax")
        if self.operator and not self.whole_calls:
            raise ValueError("operator without whole_calls: an operator takes whole calls")


_OF_A_PLAIN_KERNEL = Traits()


def traits_of(kernel: InnerKernel) -> Traits:
    """The traits of ``kernel``; the defaults if it declares none."""
    found: Traits = getattr(kernel, "traits", _OF_A_PLAIN_KERNEL)
    return found


def refusal(kernel: InnerKernel, call: CallShape) -> str | None:
    """Why a kernel cannot run such a call: by its own words, or because of dropout; None if it can.

    Dropout is asked about here, so that a kernel that does not know of it never leaves it out.
    """
    reason = kernel.refusal(call)
    if reason is None and call.dropout and not traits_of(kernel).dropout:
        return "it has no dropout by the position of a pair"
    return reason


def is_bare(kernel: InnerKernel) -> bool:
    """Whether a kernel is no more than its class: it keeps nothing that its results could depend
    on, as the native one keeps its options."""
    return not getattr(kernel, "__dict__", None)


def captures(kernel: InnerKernel) -> Captures | None:
    """``kernel`` as one that reads tensors of its own, if it is."""
    return cast(Captures, kernel) if traits_of(kernel).captures else None


def calls_back(kernel: InnerKernel) -> CallsBack | None:
    """``kernel`` as one that calls users' functions in both passes, if it does."""
    return cast(CallsBack, kernel) if traits_of(kernel).calls_back else None


def row_statistics(kernel: InnerKernel) -> RowStatistics | None:
    """``kernel`` as one that can compute a few rows alone, if it can."""
    return cast(RowStatistics, kernel) if traits_of(kernel).row_statistics else None


def by_entry(kernel: InnerKernel) -> ByEntry | None:
    """``kernel`` as one that may depend on the batch entry's number, if it may."""
    return cast(ByEntry, kernel) if traits_of(kernel).by_entry else None


def sparse(kernel: InnerKernel) -> Sparse | None:
    """``kernel`` as one that says which pairs it keeps, if it does."""
    return cast(Sparse, kernel) if traits_of(kernel).sparse else None


def pairwise(kernel: InnerKernel) -> Pairwise | None:
    """``kernel`` as one that says how it changes each score, if it does."""
    return cast(Pairwise, kernel) if traits_of(kernel).pairwise else None


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


def recorded(kernel: InnerKernel) -> Recorded | None:
    """``kernel`` as one whose calls torch's autograd can record, if it can."""
    return cast(Recorded, kernel) if traits_of(kernel).recorded else None


def check_mask_gradient(kernel: InnerKernel) -> None:
    """Check that the gradient of a mask beside ``kernel`` is that of plain softmax.

    Raises:
        NotImplementedError: it computes another function of the scores.
    """
    traits = traits_of(kernel)
    if (traits.own_attention or traits.probed_as is not None) and not traits.pairwise:
        raise NotImplementedError(
            f"kernel {kernel.name!r} has no gradient of attn_mask: it computes more than the "
            f"softmax of scores and mask; pass attn_mask.detach(), or take another kernel"
        )


def _methods(protocol: type) -> tuple[str, ...]:
    return tuple(name for name in vars(protocol) if not name.startswith("_"))


METHODS = MappingProxyType(
    {
        "captures": _methods(Captures),
        "calls_back": _methods(CallsBack),
        "row_statistics": _methods(RowStatistics),
        "by_entry": _methods(ByEntry),
        "sparse": _methods(Sparse),
        "pairwise": _methods(Pairwise),
        "whole_calls": _methods(WholeCalls),
        "task_calls": _methods(TaskCalls),
        "operator": _methods(Operator),
        "measured": _methods(Measured),
        "recorded": _methods(Recorded),
    }
)
"""By trait, the methods that a kernel with this trait has."""


def contradiction(kernel: InnerKernel) -> str | None:
    """How a kernel's traits contradict the rest of it, in words; None if they do not."""
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
