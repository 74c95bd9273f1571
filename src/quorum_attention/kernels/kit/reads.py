"""What a user's function depends on, as far as its closure shows.

A kernel caches which blocks its mask keeps. By contract a mask stays the same as long as its kernel
lives, as FlexAttention's block masks do. But in practice the numbers and tensors in a function's
closure do change (a length, ids that are edited in place), so they are compared in every call.
"""

from __future__ import annotations

import hashlib
import types
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from quorum_attention.kernels.kit.masks import BlockMask
from quorum_attention.kernels.outside import outside

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# The most things looked at, and the deepest nesting of functions and containers.
_MOST = 256
_DEEPEST = 8
# Most bytes of a tensor whose numbers are compared in every call.
_MOST_BYTES = 4096
_are_transforms_active = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack


class Same:
    """A tensor at one version: no longer equal once the tensor has been written to.

    Of a small one in host memory the numbers are compared as well: what NumPy, or anybody through
    ``.data``, writes to it torch does not count. It does not keep the tensor alive.
    """

    __slots__ = ("address", "reference", "state")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = id(tensor)
        self.reference = weakref.ref(tensor)
        version = None if tensor.is_inference() else tensor._version
        strided = tensor.layout == torch.strided and not tensor.is_nested
        self.state = version, tensor.data_ptr() if strided else 0, _numbers(tensor, strided)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        mine = self.reference()
        return mine is not None and mine is other.reference() and self.state == other.state

    def __hash__(self) -> int:
        return hash((self.address, self.state))


def _numbers(tensor: torch.Tensor, strided: bool) -> bytes | None:
    """What stands for the numbers of a small tensor in host memory; None for others."""
    if not (strided and tensor.is_cpu and tensor.nbytes <= _MOST_BYTES):
        return None
    with suppress(RuntimeError, TypeError):  # other dtypes that NumPy lacks
        if not (_are_transforms_active() or _modes()):
            return _digest(tensor)
        with outside():  # they would take part in it
            return _digest(tensor)
    return None


def _digest(tensor: torch.Tensor) -> bytes:
    if tensor.dtype == torch.bfloat16:  # which NumPy lacks
        tensor = tensor.detach().view(torch.int16)
    # Forced: it is nobody's gradient.
    return hashlib.blake2b(tensor.numpy(force=True).tobytes(), digest_size=16).digest()


def reads(value: Any) -> Hashable:
    """A key that changes when a number or a tensor in a function's closure changes.

    It covers closures and default arguments, those of functions in them, and dictionaries, lists
    and tuples in those; but not globals, attributes of objects, or anything else.
    """
    return tuple(_looked_at(value))


def tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors in the closures of ``values``, found as in ``reads``."""
    found = [
        look.reference() for value in values for look in _looked_at(value) if type(look) is Same
    ]
    return [tensor for tensor in found if tensor is not None]


def codes(value: Any) -> tuple[Hashable, ...]:
    """The code of a function and of the functions in its closure; the type of anything else."""
    if value is None:
        return ()
    found: list[Hashable] = [f.__code__ for f in _functions(value)]
    return tuple(found or [type(value)])


def settled(functions: Sequence[Any]) -> Hashable | None:
    """A key that changes when anything changes that functions depend on; None if that cannot be
    seen: they name or close over an object that is no number, tensor, function or container of
    those. Modules, classes and masks of this package stay as they are."""
    found: list[Hashable] = []
    waiting: list[Any] = list(functions)
    for _ in range(_MOST):
        if not waiting:
            return tuple(found)
        thing = waiting.pop()
        kind = type(thing)
        if kind in _PLAIN or isinstance(thing, np.generic):
            found.append((kind, thing if kind in _PLAIN else thing.item()))
        elif isinstance(thing, torch.Tensor):
            found.append(Same(thing))
        elif isinstance(thing, types.FunctionType):
            found.append(thing.__code__)
            waiting += [*_closed_over(thing), *_named(thing.__code__, thing.__globals__)]
        elif kind in (dict, list, tuple) and len(thing) <= _MOST:
            found.append((kind, len(thing)))
            waiting += [part for pair in thing.items() for part in pair] if kind is dict else thing
        elif isinstance(thing, _FIXED):
            found.append((kind, id(thing)))
        else:
            return None
    return None


_FIXED = (types.ModuleType, type, types.BuiltinFunctionType, BlockMask)


def _named(code: types.CodeType, given: dict[str, Any]) -> list[Any]:
    """The globals that code may name, and code within it."""
    found = [given[name] for name in code.co_names if name in given]
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            found += _named(part, given)
    return found


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
