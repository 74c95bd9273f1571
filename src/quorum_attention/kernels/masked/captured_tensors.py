"""The tensors and plain values that users' functions read, and whether they changed.

The contract is FlexAttention's: a function stays what it is as long as its kernel
lives. But the tensors that it reads, by its closure or as globals of its module, may be
written to: autograd saves them, so that writing before the backward is an error, and a
table of blocks is made anew (``versions``). So it is if a number or a text has changed
(``plain_values``).
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

# The most values that are looked at.
_MOST = 256
_Names = frozenset[str]
_PLAIN_VALUES = (
    int,
    float,
    complex,
    str,
    bytes,
    range,
    types.NoneType,
    np.number,
    np.bool_,
)
_SEQUENCES = (list, tuple, deque, set, frozenset)
_MAPPINGS = (dict, types.MappingProxyType)


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
    values = [named.value for named in _reachable(functions)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def plain_values(functions: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """The numbers, texts, ranges and Nones that ``functions`` can read, by the names
    that the functions have for them: "keeps: self.window". Functions of one name, as
    those that one function made, have several values by one name."""
    values: dict[str, tuple[Any, ...]] = {}
    for name, value in _reachable(functions):
        if isinstance(value, _PLAIN_VALUES):
            values[name] = (*values.get(name, ()), value)
    return values


def versions(*functions: Any) -> Hashable:
    """A key that changes when a tensor is written to that ``functions`` read, or when
    a number or a text is another."""
    key = list[Hashable]()
    for named in _reachable(functions):
        if isinstance(named.value, torch.Tensor):
            key.append(TensorVersion(named.value))
        elif isinstance(named.value, _PLAIN_VALUES):
            key.append(named.value)
    return tuple(key)


def codes(value: Any) -> tuple[Hashable, ...]:
    """The type of a function, and the code of all functions that it holds."""
    values = [named.value for named in _reachable([value])]
    functions = [f for f in values if isinstance(f, types.FunctionType)]
    return type(value), *(function.__code__ for function in functions)


class _Named(NamedTuple):
    """A value, and the name that a function has for it."""

    name: str
    value: Any


class _Contents(NamedTuple):
    """The values that a value holds, and the names by which their attributes may be
    read."""

    values: list[_Named]
    names: _Names


def _reachable(functions: Sequence[Any]) -> Iterator[_Named]:
    """The functions, and all that they hold: plain values wherever they are held, and
    all else once."""
    # The nearest values come first: a library that a function uses holds many values.
    waiting = deque((_named(function), _Names()) for function in functions)
    seen_ids: set[int] = set()
    for _ in range(_MOST):
        if not waiting:
            return
        named, names = waiting.popleft()
        if id(named.value) in seen_ids:
            continue
        yield named
        if isinstance(named.value, _PLAIN_VALUES):
            continue
        seen_ids.add(id(named.value))
        if not isinstance(named.value, torch.Tensor):
            contents = _contents(named, names)
            waiting += [(inner, contents.names) for inner in contents.values]


def _named(function: Any) -> _Named:
    """A function that a user gave, with its name."""
    kind = type(function)
    return _Named(getattr(function, "__qualname__", kind.__qualname__), function)


def _contents(named: _Named, names: _Names) -> _Contents:
    """The values that a value holds.

    Args:
        names: of attributes that may be read of it.
    """
    place, value = named
    if isinstance(value, types.FunctionType):
        own_names = _attribute_names(value)
        values = _contents_of_function(value) | _globals_of(value, own_names)
        return _Contents(
            [_Named(f"{value.__qualname__}: {name}", values[name]) for name in values],
            names | own_names,
        )
    if isinstance(value, types.MethodType):
        names |= _attribute_names(value.__func__)
        bound = _Named(f"{value.__qualname__}: self", value.__self__)
        return _Contents([bound, _named(value.__func__)], names)
    if isinstance(value, partial):
        items = (*enumerate(value.args), *value.keywords.items())
        arguments = [_Named(f"{place}({name!r})", item) for name, item in items]
        return _Contents([_named(value.func), *arguments], names)
    if isinstance(value, np.ndarray):
        return _Contents(_text_of_array(place, value), names)
    if isinstance(value, (*_MAPPINGS, *_SEQUENCES)):
        return _Contents(_items(place, value), names)
    if isinstance(value, (types.ModuleType, type)):
        attributes = _class_values(value, names)
        return _Contents(_attributes(place, attributes), names)
    if hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
        call = _call_of(value)
        names |= _attribute_names(call)
        named_values = _attributes(place, _named_attributes(value, names))
        return _Contents([*named_values, _Named(place, call)], names)
    return _Contents([], names)


def _items(place: str, values: Any) -> list[_Named]:
    """The first values of a dictionary, of a sequence or of a set."""
    is_mapping = isinstance(values, _MAPPINGS)
    pairs = values.items() if is_mapping else enumerate(values)
    items: list[_Named] = []
    for index, (key, value) in enumerate(islice(pairs, _MOST)):
        # The text of another key may take long.
        shown_key = key if isinstance(key, _PLAIN_VALUES) else index
        items.append(_Named(f"{place}[{shown_key!r}]", value))
    return items


def _text_of_array(place: str, array: np.ndarray[Any, Any]) -> list[_Named]:
    """The first numbers of an array, as one value."""
    if array.dtype.hasobject:
        return []
    numbers = array.flat[:_MOST].tolist()
    return [_Named(place, str(numbers))]


def _attributes(place: str, attributes: dict[str, Any]) -> list[_Named]:
    """Attributes of an object that is called ``place``."""
    return [_Named(f"{place}.{name}", value) for name, value in attributes.items()]


def _contents_of_function(function: types.FunctionType) -> dict[str, Any]:
    """Default arguments and what the closure holds, by name."""
    code = function.__code__
    positional_defaults = function.__defaults__ or ()
    positional_names = code.co_varnames[: code.co_argcount]
    first_default = code.co_argcount - len(positional_defaults)
    names_with_default = positional_names[first_default:]
    values = dict(zip(names_with_default, positional_defaults, strict=True))
    values |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            values[name] = cell.cell_contents
    return values


def _globals_of(function: types.FunctionType, names: _Names) -> dict[str, Any]:
    """The values of its module that a function may read by one of ``names``."""
    module = function.__globals__
    return {name: module[name] for name in sorted(names & module.keys())}


def _call_of(value: Any) -> Any:
    """The function that runs when an object is called."""
    kind = type(value)
    return kind.forward if isinstance(value, torch.nn.Module) else kind.__call__


def _named_attributes(value: Any, names: _Names) -> dict[str, Any]:
    """The attributes of an object, or of a module, that have one of ``names``, and the
    plain values that its methods read."""
    names_in_methods = _names_in_methods(type(value), names)
    attributes = _class_values(type(value), names_in_methods)
    for name, attribute in list(attributes.items()):
        if isinstance(attribute, types.MemberDescriptorType):
            del attributes[name]
            with suppress(AttributeError):  # not assigned yet
                attributes[name] = getattr(value, name)
    instance = getattr(value, "__dict__", {})
    for name in sorted(names_in_methods & instance.keys()):
        if isinstance(instance[name], _PLAIN_VALUES):
            attributes[name] = instance[name]
    places = [instance]
    for name in ("_buffers", "_parameters", "_modules"):
        of_module = instance.get(name) or {}
        places.append(of_module)
    for place in places:
        attributes |= {name: place[name] for name in sorted(names & place.keys())}
    return attributes


def _names_in_methods(kind: type, names: _Names) -> _Names:
    """``names``, and those in the code of the methods and properties of a class that
    have one of them."""
    seen = names
    waiting = names
    while waiting:
        names_in_code = _Names()
        for place in kind.__mro__:
            if place is torch.nn.Module:  # its methods read all that a module has
                continue
            for name in waiting & vars(place).keys():
                method = vars(place)[name]
                names_in_code |= _attribute_names(getattr(method, "fget", method))
        waiting = names_in_code - seen
        seen |= names_in_code
    return seen


def _class_values(owner: Any, names: _Names) -> dict[str, Any]:
    """The plain values of a class, or of a module, that have one of ``names``, and the
    slots of a class.

    No tensors and functions: those of a library are too many.
    """
    kinds = (*_PLAIN_VALUES, types.MemberDescriptorType)
    values: dict[str, Any] = {}
    for place in reversed(getattr(owner, "__mro__", (owner,))):
        for name in sorted(names & vars(place).keys()):
            if isinstance(vars(place)[name], kinds):
                values[name] = vars(place)[name]
    return values


def _attribute_names(function: Any) -> _Names:
    """The names of attributes in a function's code, and in functions within it."""
    code = getattr(function, "__code__", function)
    if not isinstance(code, types.CodeType):
        return _Names()
    return _Names(code.co_names).union(*map(_attribute_names, code.co_consts))
