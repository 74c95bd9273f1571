"""What users' functions read, as far as it can be seen.

A kernel remembers which blocks its mask keeps, and autograd saves the tensors that a function
reads. Both look here: at closures, default arguments, arguments of ``functools.partial``, and the
globals and attributes that a function's code names, with what is in containers of those. The
contract is FlexAttention's: a function stays what it is as long as its kernel lives. What changes
all the same, and cannot be seen here, is noticed by numbers (``sample.py``,
``execution/sampled_rows.py``).
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from quorum_attention.kernels.kit.masks import BlockMask

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# The most things looked at, and the deepest nesting of functions, containers and objects.
_MOST, _DEEPEST = 256, 8
# Modules whose globals are nothing that a user changes.
_LIBRARIES = ("torch", "numpy", "functools", "math", "quorum_attention")
_Names = frozenset[str]


class TensorVersion:
    """A tensor as it is now: no longer equal once the tensor has been written to or replaced.

    torch counts what is written, but not through ``.data`` or NumPy. The tensor is not kept alive.
    """

    __slots__ = ("reference", "state")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = weakref.ref(tensor)
        version = None if tensor.is_inference() else tensor._version
        strided = tensor.layout == torch.strided and not tensor.is_nested
        self.state = id(tensor), version, tensor.data_ptr() if strided else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorVersion):
            return NotImplemented
        mine = self.reference()
        return mine is not None and mine is other.reference() and self.state == other.state

    def __hash__(self) -> int:
        return hash(self.state)


def tensors(functions: Sequence[Any], *, named: bool = True) -> list[torch.Tensor]:
    """The tensors that ``functions`` read, each once.

    Args:
        named: also those that are found by the names of globals and attributes.
    """
    found = (t for t in _leaves(functions, named) if isinstance(t, torch.Tensor))
    return list({id(t): t for t in found}.values())


def versions(*functions: Any) -> Hashable:
    """A key that changes when a number or a tensor changes that ``functions`` are seen to read."""
    return tuple(_version(leaf) for leaf in _leaves(functions, True))


def codes(value: Any) -> tuple[Hashable, ...]:
    """The code of a function and of the functions in its closure; the type of anything else."""
    found: list[Hashable] = []
    waiting = [] if value is None else [value]
    for _ in range(_MOST):
        if not waiting:
            break
        thing = waiting.pop()
        if isinstance(thing, types.FunctionType):
            found.append(thing.__code__)
            waiting += _closed_over(thing)
        elif isinstance(thing, BlockMask):
            waiting.append(thing.keeps)
        elif isinstance(thing, (list, tuple)):
            waiting += thing
    return tuple(found or ([] if value is None else [type(value)]))


def _version(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return TensorVersion(leaf)
    if isinstance(leaf, float) and leaf != leaf:
        return "nan"  # equal to itself
    return type(leaf), leaf.item() if isinstance(leaf, np.generic) else leaf


def _leaves(functions: Sequence[Any], named: bool) -> Iterator[Any]:
    """Numbers, words, code and tensors that ``functions`` read."""
    waiting: list[tuple[Any, int, _Names]] = [(f, 0, _Names()) for f in reversed(functions)]
    met = set[int]()
    for _ in range(_MOST):
        if not waiting:
            return
        thing, depth, names = waiting.pop()
        if type(thing) in _PLAIN or isinstance(thing, (np.generic, torch.Tensor)):
            yield thing
        elif depth < _DEEPEST and id(thing) not in met:
            met.add(id(thing))
            if isinstance(thing, types.FunctionType):
                yield thing.__code__
            waiting += [(part, depth + 1, of) for part, of in _parts(thing, names, named)]


def _parts(thing: Any, names: _Names, named: bool) -> Iterator[tuple[Any, _Names]]:
    """What ``thing`` holds, each with the names by which its own attributes may be read."""
    if isinstance(thing, types.FunctionType):
        own = names | _names(thing.__code__)
        held = list(_closed_over(thing))
        if named and (thing.__module__ or "").partition(".")[0] not in _LIBRARIES:
            held += [thing.__globals__[n] for n in sorted(own) if n in thing.__globals__]
    elif isinstance(thing, types.MethodType):
        own, held = names | _names_of(thing.__func__), [thing.__func__, thing.__self__]
    elif isinstance(thing, partial):
        own, held = names, [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, dict):
        own, held = names, list(thing.values()) if len(thing) <= _MOST else []
    elif isinstance(thing, (list, tuple, deque)):
        own, held = names, list(thing) if len(thing) <= _MOST else []
    else:
        own, held = _attributes(thing, names) if named else (names, [])
    yield from ((part, own) for part in held)


def _attributes(thing: Any, names: _Names) -> tuple[_Names, list[Any]]:
    """The attributes of an object that are read by ``names``, or where the object is called."""
    if isinstance(thing, (types.ModuleType, type, BlockMask)) or not hasattr(thing, "__dict__"):
        return names, []
    kind = type(thing)
    called = kind.forward if isinstance(thing, torch.nn.Module) else getattr(kind, "__call__", None)  # noqa: B004
    own = names | _names_of(called)
    held = vars(thing)
    places = (held, *(held.get(n) or {} for n in ("_buffers", "_parameters", "_modules")))
    return own, [place[name] for place in places for name in sorted(own & place.keys())]


def _names_of(function: Any) -> _Names:
    return _names(function.__code__) if isinstance(function, types.FunctionType) else _Names()


@lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> _Names:
    """The names of globals and attributes in code, and in functions within it."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return _Names(code.co_names).union(*inner)


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not assigned yet
