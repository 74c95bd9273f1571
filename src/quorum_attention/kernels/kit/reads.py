"""What a user's mask depends on, as far as it is plain to see.

What has been found out about a mask (which blocks it empties) is kept by its kernel. By contract a
mask means the same as long as its kernel lives, as a block mask of FlexAttention does. But numbers
and tensors that a function closes over do change in practice (a length, ids edited in place), so
those are looked at with every call.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch

from quorum_attention.kernels.kit.masks import BlockMask

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# Things that are looked at, functions within functions, at most.
_MOST = 256
_DEEPEST = 8


class Same:
    """A tensor as long as nobody writes to it: equal to itself at the same version alone.

    It does not keep the tensor.
    """

    __slots__ = ("address", "reference", "state")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = id(tensor)
        self.reference = weakref.ref(tensor)
        version = None if tensor.is_inference() else tensor._version
        strided = tensor.layout == torch.strided and not tensor.is_nested
        self.state = version, tensor.data_ptr() if strided else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        mine = self.reference()
        return mine is not None and mine is other.reference() and self.state == other.state

    def __hash__(self) -> int:
        return hash((self.address, self.state))


def reads(value: Any) -> Hashable:
    """A key that is another one when a number or a tensor that a function closes over has changed.

    Looked at are closures and default arguments, of functions in them as well, and dictionaries,
    lists and tuples in those. Globals, attributes of objects and whatever else is not.
    """
    return tuple(_looked_at(value))


def tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors that functions close over, found as ``reads`` finds them."""
    found = [
        look.reference() for value in values for look in _looked_at(value) if type(look) is Same
    ]
    return [tensor for tensor in found if tensor is not None]


def codes(value: Any) -> tuple[Hashable, ...]:
    """The code of a function and of those that it closes over; of anything else its type."""
    if value is None:
        return ()
    found: list[Hashable] = [f.__code__ for f in _functions(value)]
    return tuple(found or [type(value)])


def _looked_at(value: Any) -> Iterator[Hashable]:
    waiting = [(value, 0)]
    for _ in range(_MOST):
        if not waiting:
            return
        thing, depth = waiting.pop()
        kind = type(thing)
        if kind in _PLAIN or isinstance(thing, np.generic):
            yield kind, thing if kind in _PLAIN else thing.item()
        elif isinstance(thing, torch.Tensor):
            yield Same(thing)
        elif depth < _DEEPEST and isinstance(thing, types.FunctionType):
            yield thing.__code__
            waiting += [(part, depth + 1) for part in _closed_over(thing)]
        elif depth < _DEEPEST and kind in (dict, list, tuple) and len(thing) <= _MOST:
            yield kind, len(thing)
            parts = [part for pair in thing.items() for part in pair] if kind is dict else thing
            waiting += [(part, depth + 1) for part in parts]
        else:
            yield kind, id(thing)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    waiting = [value]
    for _ in range(_MOST):
        if not waiting:
            return
        thing = waiting.pop()
        if isinstance(thing, types.FunctionType):
            yield thing
            waiting += _closed_over(thing)
        elif isinstance(thing, BlockMask):
            waiting.append(thing.keeps)
        elif isinstance(thing, (list, tuple)):
            waiting += thing


def _closed_over(function: types.FunctionType) -> list[Any]:
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            continue  # not assigned yet
    return found
