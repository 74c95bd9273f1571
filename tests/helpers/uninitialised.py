"""Fresh memory full of what nobody can take for a result, while tests run.

``torch.empty`` and its like hand out whatever was there before, which is often zeros:
what reads a row that it never wrote looks right until one day it does not. Here it
finds NaN, in integers the largest number (in bytes, all bits: NaN in every floating
dtype that is laid over them).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

# Filling more takes longer than the test: such tensors are sparse files, or meant to
# fail.
_MOST_BYTES = 256 << 20
# What they make for themselves is theirs, and may be traced.
_NOT_FILLED = ("torch", "triton")
_PLACES = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
)

_Make = Callable[..., torch.Tensor]


@contextmanager
def filled() -> Iterator[None]:
    """In here what ``torch.empty`` makes is full of NaN, for whoever calls it but torch
    itself."""
    # torch looks itself up in these tables, which are made when first asked for.
    torch.utils._device._device_constructors()
    before = [(place, name, getattr(place, name)) for place, name in _PLACES]
    for place, name, make in before:
        setattr(place, name, _filling(make))
    try:
        yield
    finally:
        for place, name, make in before:
            setattr(place, name, make)


def _filling(make: _Make) -> _Make:
    @wraps(make)
    def made(*args: Any, **named: Any) -> torch.Tensor:
        tensor = make(*args, **named)
        asks = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if asks not in _NOT_FILLED and _is_memory(tensor):
            # Not as an operation on the tensor: its version is 0, whoever looks.
            tensor.data.fill_(nonsense(tensor.dtype))
        return tensor

    return made


def _is_memory(tensor: torch.Tensor) -> bool:
    """Real memory of a usual size, with nobody watching what is done to it."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_meta
        and tensor.layout is torch.strided
        and tensor.untyped_storage().nbytes() <= _MOST_BYTES
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._is_tracing()
    )


def nonsense(dtype: torch.dtype) -> float | int | bool:
    """What stands in fresh memory of ``dtype``."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
