"""What users' functions depend on, as it was in a forward: whether its backward meets the same.

A function (``Mask.keeps``, ``mask_mod``, ``score_mod``, ...) is called again in the backward. By
then the variable of a loop that it closes over may have another value, and the gradients would be
those of another attention. Tensors that are written to are torch's matter (``Captures.captured``);
here are names that mean something else than before: numbers, words, other tensors.
"""

from __future__ import annotations

import dis
import types
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from quorum_attention.kernels.kit.masks import BlockMask

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# The most things looked at, and the deepest nesting of functions, containers and objects.
_MOST, _DEEPEST = 256, 8


class Unchanged:
    """What ``functions`` depend on now, as far as it can be seen: closures, defaults, globals,
    attributes of objects, arguments of ``functools.partial``, and what is in containers of those.

    What a function writes itself (a counter) is left aside. Tensors are not kept alive.
    """

    def __init__(self, functions: Sequence[Any]) -> None:
        self._functions = tuple(functions)
        self._then = [(at, path, _kept(thing)) for at, path, thing in _numbered(self._functions)]

    def check(self) -> None:
        """Raise an error if anything has changed since.

        Raises:
            RuntimeError: a name means something else; it says which.
        """
        now = {(at, path): thing for at, path, thing in _numbered(self._functions)}
        for at, path, then in self._then:
            if (at, path) not in now or not _is_same(then, now[at, path]):
                raise RuntimeError(
                    f"{path} has changed between the forward and its backward, which calls the "
                    "function again: gradients would be of another attention. Give every function "
                    "values of its own: as a default (lambda b, h, q, k, n=n: ...), or by a "
                    "function that returns it"
                )


def tensors(functions: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that ``functions`` depend on, as far as they can be seen; each once."""
    found = {id(t): t for _, t in _leaves(functions) if isinstance(t, torch.Tensor)}
    return list(found.values())


def _numbered(functions: Sequence[Any]) -> Iterator[tuple[int, str, Any]]:
    """``_leaves``, with a number where several have one path."""
    times: dict[str, int] = {}
    for path, thing in _leaves(functions):
        times[path] = times.get(path, -1) + 1
        yield times[path], path, thing


def _kept(thing: Any) -> Any:
    return weakref.ref(thing) if isinstance(thing, torch.Tensor) else thing


def _is_same(then: Any, now: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return isinstance(then, weakref.ref) and then() is now
    # By words, because a NaN is no other number than it was.
    return type(then) is type(now) and (then == now or repr(then) == repr(now))


class _Names(NamedTuple):
    """Names in a function's code, less those that it writes."""

    outer: frozenset[str]
    attributes: frozenset[str]


@lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> _Names:
    read, written = set(), set()
    attributes, set_attributes = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname in ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF"):
            written.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(step.argval)
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            set_attributes.add(step.argval)
    outer = read | set(code.co_freevars)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):  # a function within it
            inner = _names(part)
            outer |= inner.outer
            attributes |= inner.attributes
    return _Names(frozenset(outer - written), frozenset(attributes - set_attributes))


def _leaves(functions: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """(path, number, word or tensor) of all that ``functions`` depend on."""
    start = [(_name_of(f), f, 0, frozenset[str]()) for f in functions if f is not None]
    waiting, known = start[::-1], set[int]()
    for _ in range(_MOST):
        if not waiting:
            return
        path, thing, depth, attributes = waiting.pop()
        if type(thing) in _PLAIN or isinstance(thing, (np.generic, torch.Tensor)):
            yield path, thing
        elif depth < _DEEPEST and id(thing) not in known:
            known.add(id(thing))
            parts = _parts(path, thing, attributes)
            waiting += [(name, part, depth + 1, names) for name, part, names in parts]


def _parts(
    path: str, thing: Any, attributes: frozenset[str]
) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """What ``thing`` holds, each with its name and the attributes that are read of it."""
    kind = type(thing)
    if isinstance(thing, types.FunctionType):
        yield from _read_by(thing)
    elif isinstance(thing, types.MethodType):
        yield path, thing.__func__, attributes
        if isinstance(thing.__func__, types.FunctionType):
            yield "self", thing.__self__, _names(thing.__func__.__code__).attributes
    elif isinstance(thing, partial):
        named = [*enumerate(thing.args), *thing.keywords.items()]
        yield path, thing.func, attributes
        yield from ((f"{path}({name})", part, attributes) for name, part in named)
    elif kind in (dict, list, tuple) and len(thing) <= _MOST:
        named = list(thing.items()) if kind is dict else list(enumerate(thing))
        yield from ((f"{path}[{name!r}]", part, attributes) for name, part in named)
    elif not isinstance(thing, (types.ModuleType, type, BlockMask)) and hasattr(thing, "__dict__"):
        call = getattr(kind, "__call__", None)  # noqa: B004
        if isinstance(thing, torch.nn.Module):
            call = kind.forward
        if isinstance(call, types.FunctionType):
            yield from _read_by(call)
            attributes |= _names(call.__code__).attributes
        own = vars(thing)
        for held in (own, *(own.get(name) or {} for name in ("_buffers", "_parameters"))):
            for name in attributes & held.keys():
                yield f"{path}.{name}", held[name], attributes


# Modules whose globals are nothing that a user changes.
_LIBRARIES = ("torch", "numpy", "functools", "math", "quorum_attention")


# What a function of ours may have from a user.
_HANDED_ON = (types.FunctionType, types.MethodType, partial, torch.Tensor)


def _read_by(function: types.FunctionType) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """What a function reads by name, but not as an argument of its call."""
    names, code = _names(function.__code__), function.__code__
    module = (function.__module__ or "").partition(".")[0]
    first = code.co_argcount - len(function.__defaults__ or ())
    for name, part in zip(
        code.co_varnames[first : code.co_argcount], function.__defaults__ or (), strict=False
    ):
        yield name, part, names.attributes
    for name, part in (function.__kwdefaults__ or {}).items():
        yield name, part, names.attributes
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            part = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
        # Our own functions are as they were made, but they may have a user's within.
        own = module == "quorum_attention" and not isinstance(part, _HANDED_ON)
        if name in names.outer and not own:
            yield name, part, names.attributes
    if module in _LIBRARIES:
        return
    for name in names.outer & function.__globals__.keys() - set(code.co_freevars):
        yield name, function.__globals__[name], names.attributes


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
