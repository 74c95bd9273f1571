"""The tensors that users' functions read, and whether they have been written to.

The contract is FlexAttention's: a function stays what it is as long as its kernel
lives. But the tensors that it reads, by its closure or as globals of its module, may be
written to: autograd saves them, so that writing before the backward is an error, and a
table of blocks is made anew (``versions``). So it is if a number has changed.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

# The most values that are looked at.
_MOST = 256
_Names = frozenset[str]
_NUMBERS = (int, float)


class TensorVersion:
    """A tensor as it is now: no longer equal once the tensor has been written to or
    replaced.

    torch counts what is written, but not through ``.data`` or NumPy. The tensor is not
    kept alive.
    """

    __slots__ = ("reference", "state")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = weakref.ref(tensor)
        version = None if tensor.is_inference() else tensor._version
        is_strided = tensor.layout == torch.strided
        has_pointer = is_strided and not tensor.is_nested
        pointer = tensor.data_ptr() if has_pointer else 0
        self.state = (id(tensor), version, pointer)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorVersion):
            return NotImplemented
        tensor = self.reference()
        if tensor is None or tensor is not other.reference():
            return False
        return self.state == other.state

    def __hash__(self) -> int:
        return hash(self.state)


def tensors(functions: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors in closures, globals, default arguments, arguments of
    ``functools.partial`` and named attributes of ``functions``, each once."""
    return [value for value in _reachable(functions) if isinstance(value, torch.Tensor)]


def versions(*functions: Any) -> Hashable:
    """A key that changes when a tensor is written to that ``functions`` read, or when
    a number is another."""
    key = list[Hashable]()
    for value in _reachable(functions):
        if isinstance(value, torch.Tensor):
            key.append(TensorVersion(value))
        elif isinstance(value, _NUMBERS):
            key.append(value)
    return tuple(key)


def codes(value: Any) -> tuple[Hashable, ...]:
    """The type of a function, and the code of all functions that it holds."""
    functions = (f for f in _reachable([value]) if isinstance(f, types.FunctionType))
    return type(value), *(function.__code__ for function in functions)


class _Contents(NamedTuple):
    """The values that a value holds, and the names by which their attributes may be
    read."""

    values: list[Any]
    names: _Names


def _reachable(functions: Sequence[Any]) -> Iterator[Any]:
    """The functions, and all that they hold: numbers wherever they are held, and all
    else once."""
    # The nearest values come first: a library that a function uses holds many values.
    waiting = deque((function, _Names()) for function in functions)
    seen_ids: set[int] = set()
    for _ in range(_MOST):
        if not waiting:
            return
        value, names = waiting.popleft()
        if id(value) in seen_ids:
            continue
        if not isinstance(value, _NUMBERS):
            seen_ids.add(id(value))
        yield value
        if isinstance(value, torch.Tensor):
            continue
        contents = _contents(value, names)
        waiting += [(inner, contents.names) for inner in contents.values]


def _contents(value: Any, names: _Names) -> _Contents:
    """The values that ``value`` holds.

    Args:
        names: of attributes that may be read of it.
    """
    if isinstance(value, types.FunctionType):
        own_names = _attribute_names(value)
        values = [*_contents_of_function(value), *_globals_of(value, own_names)]
        return _Contents(values, names | own_names)
    if isinstance(value, types.MethodType):
        names |= _attribute_names(value.__func__)
        return _Contents([value.__self__, value.__func__], names)
    if isinstance(value, partial):
        return _Contents([value.func, *value.args, *value.keywords.values()], names)
    if isinstance(value, dict):
        return _Contents(list(value.values()), names)
    if isinstance(value, (list, tuple, deque)):
        return _Contents(list(value), names)
    if hasattr(value, "__dict__") and not isinstance(value, (types.ModuleType, type)):
        call = _call_of(value)
        names |= _attribute_names(call)
        return _Contents([*_named_attributes(value, names), call], names)
    return _Contents([], names)


def _contents_of_function(function: types.FunctionType) -> list[Any]:
    """Default arguments and what the closure holds."""
    positional_defaults = function.__defaults__ or ()
    named_defaults = function.__kwdefaults__ or {}
    values = [*positional_defaults, *named_defaults.values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            values.append(cell.cell_contents)
    return values


def _globals_of(function: types.FunctionType, names: _Names) -> list[Any]:
    """The values of its module that a function may read by one of ``names``."""
    module = function.__globals__
    return [module[name] for name in sorted(names & module.keys())]


def _call_of(value: Any) -> Any:
    """The function that runs when an object is called."""
    kind = type(value)
    return kind.forward if isinstance(value, torch.nn.Module) else kind.__call__


def _named_attributes(value: Any, names: _Names) -> list[Any]:
    """The attributes of an object, or of a module, that have one of ``names``."""
    places = [vars(value)]
    for name in ("_buffers", "_parameters", "_modules"):
        of_module = vars(value).get(name) or {}
        places.append(of_module)
    named_values: list[Any] = []
    for place in places:
        held_names = sorted(names & place.keys())
        named_values.extend(place[name] for name in held_names)
    return named_values


def _attribute_names(function: Any) -> _Names:
    """The names of attributes in a function's code, and in functions within it."""
    code = getattr(function, "__code__", function)
    if not isinstance(code, types.CodeType):
        return _Names()
    return _Names(code.co_names).union(*map(_attribute_names, code.co_consts))
