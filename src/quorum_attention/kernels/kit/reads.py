"""What a user's function depends on.

What has been found out about a mask (which blocks it empties) is kept, and must not be used any
longer when the mask means something else: a number in its closure, a tensor edited in place.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Hashable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_UNCHANGEABLE = (types.ModuleType, type, types.BuiltinFunctionType)
# Things that a walk goes through at most.
_MOST = 4000


class Same:
    """A thing that is equal to itself alone, for a tensor as long as nobody writes to it.

    It holds the thing, so that no other can take its address.
    """

    __slots__ = ("value", "version")

    def __init__(self, value: object) -> None:
        self.value = value
        self.version = None
        if isinstance(value, torch.Tensor) and not value.is_inference():
            self.version = value._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        return self.value is other.value and self.version == other.version

    def __hash__(self) -> int:
        return hash((id(self.value), self.version))


def reads(value: Any) -> Hashable:
    """A key that is another one when what ``value`` reads has changed.

    Followed are closures, default arguments, globals that a function names, methods' objects,
    containers and attributes, up to some thousand things. Anything else counts as unchangeable,
    and so do libraries.
    """
    return _Walk().key(value)


def codes(value: Any) -> tuple[types.CodeType, ...]:
    """The code of a function and of all that it calls, as far as ``reads`` follows."""
    walk = _Walk()
    walk.key(value)
    return tuple(walk.codes)


class _Walk:
    """One walk from a function through what it reads."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.codes: list[types.CodeType] = []

    def key(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, (torch.Tensor, *_UNCHANGEABLE)) or _of_a_library(value):
            return Same(value)
        if isinstance(value, np.ndarray):
            if value.flags.writeable:
                return value.shape, value.dtype.str, value.tobytes()
            return Same(value)
        if id(value) in self.seen:
            return "seen", self.seen[id(value)]
        if len(self.seen) >= _MOST:
            return Same(value)
        self.seen[id(value)] = len(self.seen)
        if isinstance(value, types.FunctionType):
            self.codes.append(value.__code__)
            parts = [value.__defaults__, value.__kwdefaults__, *_captured(value)]
            return value.__code__, tuple(map(self.key, parts))
        if isinstance(value, dict):
            return dict, tuple((self.key(k), self.key(v)) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(self.key, value))
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(map(self.key, value))
        return type(value), tuple(map(self.key, _parts(value))) or Same(value)


def _of_a_library(value: Any) -> bool:
    module = getattr(value, "__module__", None)
    return isinstance(module, str) and module.split(".")[0] in ("torch", "numpy", "math")


def _parts(value: Any) -> list[Any]:
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    # An object that can be called: its attributes, and what calling it does.
    call = inspect.getattr_static(type(value), "__call__", None)
    return [*([call] if isinstance(call, types.FunctionType) else []), *_attributes(value)]


def _attributes(value: Any) -> list[Any]:
    return [part for pair in sorted(getattr(value, "__dict__", {}).items()) for part in pair]


def _captured(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None
    for name in _names(function.__code__):
        if name in function.__globals__:
            found = function.__globals__[name]
            if found is not function:
                yield found


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
