"""Where a function may read its numbers: each place is made for a tensor, read, and replaced."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Read = Callable[[], torch.Tensor]
Replace = Callable[[torch.Tensor], None]

STATE = types.SimpleNamespace(numbers=torch.zeros(8, dtype=torch.int64))


@dataclass(frozen=True)
class Place:
    """``make(tensor)`` gives a function that reads it there, and one that puts another there.

    ``learns``: it can hold a tensor that requires a gradient. ``whole``: it can hold whole numbers.
    """

    make: Callable[[torch.Tensor], tuple[Read, Replace]]
    learns: bool = True
    whole: bool = True


class _Holder(torch.nn.Module):
    """A module that has the numbers below a name, and tells them in several ways."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.put(tensor)

    def put(self, tensor: torch.Tensor) -> None:
        for kept in (self._parameters, self._buffers):
            kept.pop("slopes", None)
        if isinstance(tensor, torch.nn.Parameter):
            self.slopes = tensor
        else:
            self.register_buffer("slopes", tensor)

    @property
    def told(self) -> torch.Tensor:
        return self.slopes

    def tell(self) -> torch.Tensor:
        return self.slopes


class _Slots:
    __slots__ = ("slopes",)


def _closure(tensor: torch.Tensor) -> tuple[Read, Replace]:
    held = tensor

    def read() -> torch.Tensor:
        return held

    def replace(new: torch.Tensor) -> None:
        nonlocal held
        held = new

    return read, replace


def _of_module(read: Callable[[_Holder], torch.Tensor]) -> Place:
    def make(tensor: torch.Tensor) -> tuple[Read, Replace]:
        module = _Holder(tensor)
        return lambda: read(module), module.put

    return Place(make)


def _submodule(tensor: torch.Tensor) -> tuple[Read, Replace]:
    module = torch.nn.Module()
    module.alibi = _Holder(tensor)
    return lambda: module.alibi.slopes, module.alibi.put  # type: ignore[union-attr]


def _module_list(tensor: torch.Tensor) -> tuple[Read, Replace]:
    module = torch.nn.ModuleList([_Holder(tensor)])
    return lambda: module[0].slopes, module[0].put


def _parameter_list(tensor: torch.Tensor) -> tuple[Read, Replace]:
    module = torch.nn.ParameterList([torch.nn.Parameter(tensor, tensor.requires_grad)])

    def replace(new: torch.Tensor) -> None:
        module[0] = new

    return lambda: module[0], replace


def _at(container: Any, key: Any) -> tuple[Read, Replace]:
    def replace(new: torch.Tensor) -> None:
        container[key] = new

    return lambda: container[key], replace


def _named(holder: Any) -> tuple[Read, Replace]:
    def replace(new: torch.Tensor) -> None:
        holder.slopes = new

    return lambda: holder.slopes, replace


def _set(holder: Any, tensor: torch.Tensor) -> tuple[Read, Replace]:
    holder.slopes = tensor
    return _named(holder)


def _numpy(tensor: torch.Tensor) -> tuple[Read, Replace]:
    array = tensor.detach().clone().numpy()

    def replace(new: torch.Tensor) -> None:
        array[:] = new.detach().numpy()

    return lambda: torch.tensor(array), replace


def _default(tensor: torch.Tensor) -> tuple[Read, Replace]:
    def read(held: torch.Tensor = tensor) -> torch.Tensor:
        return held

    def replace(new: torch.Tensor) -> None:
        read.__defaults__ = (new,)

    return read, replace


def _partial(tensor: torch.Tensor) -> tuple[Read, Replace]:
    def own(held: torch.Tensor) -> torch.Tensor:
        return held

    read = functools.partial(own, held=tensor)

    def replace(new: torch.Tensor) -> None:
        read.keywords["held"] = new

    return read, replace


def _global(tensor: torch.Tensor) -> tuple[Read, Replace]:
    def replace(new: torch.Tensor) -> None:
        STATE.numbers = new

    replace(tensor)
    return lambda: STATE.numbers, replace


PLACES = {
    "closure": Place(_closure),
    "module": _of_module(lambda m: m.slopes),
    "property": _of_module(lambda m: m.told),
    "method": _of_module(lambda m: m.tell()),
    "getattr": _of_module(lambda m: getattr(m, "slopes")),  # noqa: B009 (what is tried)
    "submodule": Place(_submodule),
    "module list": Place(_module_list),
    "parameter list": Place(_parameter_list, whole=False),
    "dict": Place(lambda t: _at({"slopes": t}, "slopes")),
    "ordered dict": Place(lambda t: _at(OrderedDict(slopes=t), "slopes")),
    "list": Place(lambda t: _at([t], 0)),
    "deque": Place(lambda t: _at(deque([t]), 0)),
    "object": Place(lambda t: _set(types.SimpleNamespace(), t)),
    "slots": Place(lambda t: _set(_Slots(), t)),
    "class": Place(lambda t: _named(type("Settings", (), {"slopes": t}))),
    "python module": Place(lambda t: _set(types.ModuleType("settings"), t)),
    "array": Place(_numpy, learns=False),
    "default": Place(_default),
    "partial": Place(_partial),
    "global": Place(_global),
}


def keeps_by_global(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
    """A module's function, which any process can import; it reads what its own process has."""
    kept: torch.Tensor = ((i + j) % 4 != STATE.numbers[h]) | (i == j)
    return kept


def keeps_of_zero(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
    """The same for numbers of 0, by itself."""
    kept: torch.Tensor = ((i + j) % 4 != 0) | (i == j)
    return kept
