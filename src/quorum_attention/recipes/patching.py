"""Changes of a model's modules: a module gets a class of its own, with one method replaced.

The class is changed, and not the module, because a method of the class gets the module that it is
called on. A function stored in the module would be bound to that module for good, and copies of it
(replicas of ``DataParallel``, ``copy.copy``) would run the original's weights. Copies and unpickled
modules keep the changed class.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch

# The attribute of a changed class: how it was made, the arguments of ``_changed_class``.
_CHANGED = "_quorum_attention_change"
# A module has other weights for a while: calls of other threads wait, or it might keep those.
swapping = threading.RLock()


@dataclass(frozen=True)
class Change:
    """One change of a model.

    Attributes:
        name: of the change.
        done: whether it was made.
        how: how it was made, or why it was left out.
    """

    name: str
    done: bool
    how: str

    def __str__(self) -> str:
        return f"{self.name}: {'' if self.done else 'left out: '}{self.how}"


def plain_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class that a module had before ``patch``."""
    kind = type(module)
    change = vars(kind).get(_CHANGED)
    return kind if change is None else change[0]


def patch(
    module: torch.nn.Module, method: str, function: Callable[..., Any], *options: Any
) -> None:
    """Replace a method of one module. An earlier change of the module is taken back.

    Args:
        module: the module.
        method: "forward" or "__call__".
        function: called as ``function(*options, plain, module, ...)``, where ``plain`` is the
            method of the module's class. A copy of the module is pickled with the function's name.
        options: hashable.
    """
    plain: Any = plain_class(module)
    kind = _changed_class(plain, method, function, options)
    if method == "forward":
        # A forward in the module, as libraries leave behind, would hide the method of the class.
        _forget_forward(module, kind)
    module.__class__ = kind


def is_patched(module: torch.nn.Module, function: Callable[..., Any]) -> bool:
    """Whether a method of the module runs ``function``. Libraries (FSDP, parametrizations) may have
    made a subclass of the changed class since."""
    changes = [vars(kind).get(_CHANGED) for kind in type(module).__mro__]
    return any(change is not None and change[2] is function for change in changes)


def unpatch(module: torch.nn.Module) -> None:
    """Give a module its class back."""
    kind = plain_class(module)
    if _is_run_by_hooks(module):
        _forget_forward(module, kind)
    module.__class__ = kind


def _is_run_by_hooks(module: torch.nn.Module) -> bool:
    """Whether the module's forward is that of Accelerate's hooks, which run ``_old_forward``."""
    return hasattr(module, "_hf_hook") and "_old_forward" in vars(module)


def _forget_forward(module: Any, kind: Any) -> None:
    """Let a module run the forward of ``kind``. Accelerate's hooks stay around it, and so move a
    call's inputs and fetch its weights once."""
    if _is_run_by_hooks(module):
        module._old_forward = MethodType(kind.forward, module)
    else:
        vars(module).pop("forward", None)


@cache
def _changed_class(
    plain: type[torch.nn.Module],
    method: str,
    function: Callable[..., Any],
    options: tuple[Any, ...],
) -> type[torch.nn.Module]:
    """The subclass of ``plain`` whose method runs ``function``. Equal changes share a class."""

    def changed(self: torch.nn.Module, *args: Any, **named: Any) -> Any:
        return function(*options, getattr(plain, method), self, *args, **named)

    # torch's compiler counts recompilations by code, and gives up after eight: each class has its
    # own.
    changed.__code__ = changed.__code__.replace()
    wraps(getattr(plain, method))(changed)

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        reduced = super(kind, self).__reduce_ex__(max(2, protocol))
        if type(self) is not kind:  # a library has made a subclass of this class
            return reduced
        return (_restored, (plain, method, function, options), *reduced[2:])

    names = {
        method: changed,
        "__reduce_ex__": reduce,
        _CHANGED: (plain, method, function, options),
        # Libraries store a class by these names and look it up again.
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    kind: type[torch.nn.Module] = type(plain.__name__, (plain,), names)
    return kind


def _restored(*change: Any) -> torch.nn.Module:
    """An empty module of a changed class, for pickle and ``copy``."""
    kind: type[torch.nn.Module] = _changed_class(*change)
    return kind.__new__(kind)


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether the module runs the forward that its class was written with, or ours around that."""
    kind = plain_class(module)
    forward = vars(module).get("_old_forward" if _is_run_by_hooks(module) else "forward")
    author = next(parent for parent in kind.__mro__ if "forward" in vars(parent))
    if kind.forward.__module__ != author.__module__:  # Liger's and Unsloth's, of all models
        return False
    # Libraries that took their forward back left a method of the class behind.
    written = (kind.forward, type(module).forward)
    return forward is None or getattr(forward, "__func__", None) in written


def is_offloaded(module: torch.nn.Module) -> bool:
    """Whether weights of the module come from elsewhere in its forward, as by Accelerate's
    offloading, or are not loaded yet."""
    return any(weight.is_meta for weight in module.parameters())


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """The module in evaluation; afterwards each part has its own mode again.

    Modes are set part by part: some modules' ``eval`` does more (it merges adapters).
    """
    trained = [part for part in module.modules() if part.training]
    try:
        for part in trained:
            part.training = False
        yield
    finally:
        for part in trained:
            part.training = True


def results_on(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """What a module returns in evaluation, or None if it takes no such tensor, or makes another
    kind of tensor of it."""
    try:
        with torch.no_grad(), evaluating(module):
            result = module(x)
    except Exception:  # whatever it is
        return None
    alike = isinstance(result, torch.Tensor) and (result.shape, result.dtype) == (x.shape, x.dtype)
    return result if alike else None


def drawn(*sizes: int) -> torch.Tensor:
    """The same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sizes, generator=generator, device="cpu", dtype=torch.float64)
