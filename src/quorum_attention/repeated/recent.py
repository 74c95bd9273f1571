"""The last few calls on a CPU, told by one look of torch's own at their tensors.

A name (``likeness.py``) is made by two dozen functions of torch's and of Python's. After a backward
of a few megabytes no cache holds them any more, nor what they read: 80 us, where one function that
compares dtypes, sizes, strides and dispatch keys takes 7 (docs/planner.md). It is what compiled
code is guarded by; the keys are those with all that is active: autocast, tracers, transformations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from quorum_attention.call.settings import current
from quorum_attention.execution.device.lookup import BACKENDS, GPU
from quorum_attention.kernels.registry import registrations
from quorum_attention.kernels.torch_private import outside
from quorum_attention.planner.calibration import rates_known
from quorum_attention.repeated.likeness import ANY_GPU, PLAIN
from quorum_attention.repeated.small import Small
from quorum_attention.repeated.whole import Whole

# By names of this file, as in ``likeness.py``.
_modes, _forward_ad = torch._C._len_torch_dispatch_stack, torch.autograd.forward_ad
_transforms, _strided = torch._C._are_functorch_transforms_active, torch.strided
_deterministic, _records = torch._C._get_deterministic_algorithms, torch.is_grad_enabled
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_MOST = 4
# A call that is looked up by its name so often again becomes a recent one again.
_AGAIN = 16


class _Recent(NamedTuple):
    """A call that may be made again.

    Attributes:
        alike: whether so many tensors are like its own; it holds none of them.
        n_tensors: 3, and one more with a mask.
        arguments: is_causal, scale, enable_gqa.
        state: ``_state`` at the time.
        known: how it is made.
    """

    alike: Callable[..., bool]
    n_tensors: int
    arguments: tuple[object, object, object]
    state: tuple[object, ...]
    known: Small | Whole


_recent: tuple[_Recent, ...] = ()
# The last sizes and strides of calls of one name, and after how many more it is a recent one.
_seen: dict[Hashable, tuple[object, int]] = {}
_MOST_SEEN = 128


def again(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> Small | Whole | None:
    """How a call without other options is made that is like a recent one; None: it is like none."""
    if not _recent or not _usual():
        return None
    given = (query, key, value) if mask is None else (query, key, value, mask)
    for tensor in given:
        # At a tensor without sizes or strides torch's own look ends the process.
        if type(tensor) not in PLAIN or tensor.layout is not _strided or tensor.is_nested:
            return None
        if _wrapped(tensor):  # one that has left its transformation
            return None
    count = len(given)
    for alike, n_tensors, (causal, factor, grouped), state, known in _recent:
        if (
            n_tensors == count and is_causal is causal and enable_gqa is grouped
            and (scale is factor or (type(scale) is float and scale == factor))
            and alike(*given) and state == _state()
        ):  # fmt: skip
            return known
    return None


def note(
    name: Hashable,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    arguments: tuple[object, object, object],
    known: Small | Whole,
) -> None:
    """A call of this name was made as ``known``, and was like no recent one: if the one before was
    of the same sizes, it is a recent one from now on.

    Args:
        arguments: is_causal, scale, enable_gqa.
    """
    global _recent
    query, key, value, mask = given
    backend = BACKENDS.get(query.device.type)
    if backend is None or backend.own_memory:
        return
    sizes = (key.shape, query.stride(), key.stride(), value.stride())
    before, left = _seen.get(name, (None, 1))
    if before != sizes:
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen[name] = sizes, 1
        return
    _seen[name] = sizes, left - 1
    guards = _guards()
    # Torch's look takes no tensor for two.
    if left > 1 or guards is None or not _usual() or query is key or key is value or value is query:
        return
    _seen[name] = sizes, _AGAIN
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    made = _Recent(_look(guards, *tensors), len(tensors), arguments, _state(), known)
    _recent = (made, *_recent[: _MOST - 1])


def forget(known: Small | Whole | None = None) -> None:
    """Calls made as ``known`` are none of the recent ones; None: no call is."""
    global _recent
    _recent = tuple(one for one in _recent if known is not None and one.known is not known)
    _seen.clear()


def _usual() -> bool:
    """Whether nothing is active that dispatch keys do not tell, and under which a call is not what
    its arguments say."""
    if current() is not None or _modes() or _transforms() or _forward_ad._current_level >= 0:
        return False
    return not (ANY_GPU and BACKENDS[GPU].is_here())


def _state() -> tuple[object, ...]:
    """All that decisions depend on but for the call."""
    return _records(), _deterministic(), registrations(), rates_known(), BACKENDS["cpu"]


def _look(guards: Any, *tensors: torch.Tensor) -> Callable[..., bool]:
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    made = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = made.check
    return check


@functools.cache
def _guards() -> Any:
    """The class of torch's that looks at tensors; None if it is not what it is taken for here."""
    with outside():
        one = torch.zeros(2, 3, device="cpu", dtype=torch.float32)
        other = torch.zeros(3, 2, device="cpu", dtype=torch.float32)
        others = (
            other, other.mT, one.double(), one.clone().requires_grad_(),
            torch._neg_view(one), one[0],
        )  # fmt: skip
        try:
            guards = torch._C._dynamo.guards.TensorGuards
            with torch.enable_grad():
                alike = _look(guards, one)
                usable = alike(torch.ones_like(one)) is True
                usable = usable and not any(alike(other) for other in others)
                with torch.autocast("cpu"):
                    usable = usable and alike(one) is False
        except (AttributeError, TypeError, RuntimeError):
            return None
    return guards if usable else None
