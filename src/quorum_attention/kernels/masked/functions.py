"""Users' functions: which tensors they read, and how they are mapped over pairs.

The contract is FlexAttention's: a function stays what it is as long as its kernel lives. But the
tensors that it closes over may be written to: autograd saves them, so that writing before the
backward is an error, and a table of blocks is made anew (``versions``).
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quorum_attention.kernels.torch_private import no_torch_modes

MaskMod = Callable[[Any, Any, Any, Any], torch.Tensor]


# The most functions, containers, objects and tensors looked at.
_MOST = 256
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


def tensors(functions: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors in closures, default arguments, arguments of ``functools.partial`` and named
    attributes of ``functions``, each once."""
    return [thing for thing in _held_by(functions) if isinstance(thing, torch.Tensor)]


def versions(*functions: Any) -> Hashable:
    """A key that changes when a tensor is written to that ``functions`` hold."""
    return tuple(TensorVersion(tensor) for tensor in tensors(functions))


def codes(value: Any) -> tuple[Hashable, ...]:
    """The type of a function, and the code of all functions that it holds."""
    held = _held_by([value])
    return type(value), *(f.__code__ for f in held if isinstance(f, types.FunctionType))


def _held_by(functions: Sequence[Any]) -> Iterator[Any]:
    """The functions, and what they hold, each once."""
    waiting, met = [(function, _Names()) for function in reversed(functions)], set[int]()
    while waiting and len(met) < _MOST:
        thing, names = waiting.pop()
        if id(thing) not in met:
            met.add(id(thing))
            yield thing
            if not isinstance(thing, torch.Tensor):
                held, names = _parts(thing, names)
                waiting += [(part, names) for part in held]


def _parts(thing: Any, names: _Names) -> tuple[list[Any], _Names]:
    """What ``thing`` holds, and the names by which attributes of that may be read."""
    held: list[Any] = []
    if isinstance(thing, types.FunctionType):
        names |= _names(thing)
        held = [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        for cell in thing.__closure__ or ():
            with suppress(ValueError):  # not assigned yet
                held.append(cell.cell_contents)
    elif isinstance(thing, types.MethodType):
        held = [thing.__self__, thing.__func__]
        names |= _names(thing.__func__)
    elif isinstance(thing, partial):
        held = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, (dict, list, tuple, deque)):
        held = list(thing.values() if isinstance(thing, dict) else thing)
    elif hasattr(thing, "__dict__") and not isinstance(thing, (types.ModuleType, type)):
        kind, own = type(thing), vars(thing)
        names |= _names(kind.forward if isinstance(thing, torch.nn.Module) else kind.__call__)
        places = (own, *(own.get(n) or {} for n in ("_buffers", "_parameters", "_modules")))
        held = [place[name] for place in places for name in sorted(names & place.keys())]
    return held, names


def _names(function: Any) -> _Names:
    """The names of attributes in a function's code, and in functions within it."""
    code = getattr(function, "__code__", function)
    if not isinstance(code, types.CodeType):
        return _Names()
    return _Names(code.co_names).union(*map(_names, code.co_consts))


# --- Functions of single pairs, mapped over all pairs by torch.vmap ---------------------------

ScoreMod = Callable[[Any, Any, Any, Any, Any], torch.Tensor]


def over_pairs(function: Callable[..., Any], scored: bool = False) -> Callable[..., torch.Tensor]:
    """``function`` of batch, head, query, key mapped over (b, h, q, k); ``scored``: of score, too.

    The function is written for single numbers, as in FlexAttention. Where its result does not
    depend on a dimension, the dimension is expanded (stride 0).

    Raises:
        TypeError: when it is called, for a mask that returns anything but booleans: numbers would
            be joined with others bit by bit.
    """
    return _mapped(function, [0]) if scored else _mapped(boolean(function), [])


def _mapped(function: Callable[..., Any], first: list[int]) -> Callable[..., torch.Tensor]:
    found = indexing(function)
    # From the innermost dimension outwards.
    for axis in (3, 2, 1, 0):
        dims = [0 if i == axis else None for i in range(4)]
        found = torch.vmap(found, in_dims=(*first, *dims))
    return found


def indexing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which may read a tensor at a number that torch.vmap maps over, as in
    ``slopes[h]``; torch 2.10 and before would ask for the number."""

    def call(*at: torch.Tensor) -> Any:
        with _Indexing():
            return function(*at)

    return call


class _Indexing(TorchFunctionMode):
    """Tensors are read at tensors by ``aten::index``, which can be mapped."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # see TorchFunctionMode
        if func is torch.Tensor.__getitem__:
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            if at and all(isinstance(one, torch.Tensor) for one in at):
                return torch.ops.aten.index(args[0], at)
        return func(*args, **(kwargs or {}))


def boolean(mask_mod: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """``mask_mod``, whose result has to be a tensor of bool."""

    def checked(*at: torch.Tensor) -> torch.Tensor:
        kept = mask_mod(*at)
        if isinstance(kept, torch.Tensor) and kept.dtype == torch.bool:
            return kept
        got = kept.dtype if isinstance(kept, torch.Tensor) else type(kept).__name__
        raise TypeError(
            "a mask function (mask_mod, Mask.keeps) must return a tensor of torch.bool from the "
            f"tensors it gets, got {got}"
        )

    return checked


@no_torch_modes()
def depends_on_batch_head(function: Callable[..., Any], device: torch.device) -> tuple[bool, bool]:
    """Whether a mask differs between batch entries, and between heads."""
    mapped = over_pairs(function)
    # Each dimension has size 2: the stride of a dimension of size 1 tells nothing.
    twice, once = (torch.zeros(n, dtype=torch.int64, device=device) for n in (2, 1))
    found = mapped(twice, twice, once, once)
    return found.stride(0) != 0, found.stride(1) != 0
