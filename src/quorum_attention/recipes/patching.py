"""Changed classes: a module gets a class of its own, with one method replaced.

The class is changed, and not the module, because a method of the class gets the module
that it is called on. A function stored in the module would be bound to that module for
good, and copies of it (replicas of ``DataParallel``, ``copy.copy``) would run the
original's weights. Copies and unpickled modules keep the changed class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch

from quorum_attention.integrations.accelerate_private import (
    forward_in_hooks,
    is_run_by_hooks,
    replace_forward_in_hooks,
)
from quorum_attention.kernels.torch_private import as_written
from quorum_attention.recipes.changes import ModelPiece
from quorum_attention.units import counted

Replacement = Callable[..., Any]
"""Runs in place of a method, as ``replacement(*options, plain, module, ...)``, where
``plain`` is the method that the module had before."""
# The attribute of a changed class that holds its ``_Patch``.
_PATCH = "_quorum_attention_patch"


@dataclass(frozen=True)
class _Patch:
    """How a class was changed.

    Attributes:
        base: the class before.
        method: the name of the replaced method.
        function: runs in its place.
        options: the first arguments of ``function``.
    """

    base: type[torch.nn.Module]
    method: str
    function: Replacement
    options: tuple[Any, ...]


def _patch_of(kind: type) -> _Patch | None:
    """Return how a class was changed; None for a class that somebody else made."""
    patch: _Patch | None = vars(kind).get(_PATCH)
    return patch


def _patches_of(kind: type) -> list[_Patch]:
    """Return all changes of a class that were made one on the other, the first one
    first."""
    change = _patch_of(kind)
    return [] if change is None else [*_patches_of(change.base), change]


def plain_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class that a module had before all patches."""
    patches = _patches_of(type(module))
    return patches[0].base if patches else type(module)


def patch(
    module: torch.nn.Module, method: str, function: Replacement, *options: Any
) -> None:
    """Replace a method of one module. An earlier patch by the same function is taken
    back.

    Args:
        module: the module.
        method: "forward" or "__call__".
        function: runs in place of it. A copy of the module is pickled with the
            function's name.
        options: hashable.
    """
    if is_patched(module, function):
        unpatch(module, function)
    module.__class__ = _changed_class(_Patch(type(module), method, function, options))
    if method == "forward":
        _drop_forward(module)


def unpatch(module: torch.nn.Module, function: Replacement) -> None:
    """Take the patch by ``function`` back. Other patches of the module stay.

    Raises:
        RuntimeError: a library has made a class of the changed one since.
    """
    change = _patch_of(type(module))
    if change is None:
        raise RuntimeError(
            f"{type(module).__name__} cannot be changed back: a library (such as FSDP) "
            "has made another class of it since; undo changes of a model before that"
        )
    is_bound = _is_bound_forward(module, _forward_in_module(module))
    module.__class__ = change.base
    if is_bound:
        _drop_forward(module)
    if change.function is not function:
        unpatch(module, function)
        patch(module, change.method, change.function, *change.options)


def is_patched(module: torch.nn.Module, function: Replacement) -> bool:
    """Whether a method of the module's class runs ``function``. Libraries (FSDP,
    parametrizations) may have made a subclass of the changed class since."""
    changes = [_patch_of(kind) for kind in type(module).__mro__]
    return any(change is not None and change.function is function for change in changes)


def runs(module: torch.nn.Module, function: Replacement) -> bool:
    """Whether forwards of the module reach a patch: no forward in the module hides
    it."""
    if not is_patched(module, function):
        return False
    forward = _forward_in_module(module)
    return forward is None or _is_bound_forward(module, forward)


def unpatch_all(model: torch.nn.Module, function: Replacement) -> None:
    """Take all patches by ``function`` in a model back."""
    for module in model.modules():
        if is_patched(module, function):
            unpatch(module, function)


class PatchedForwards(ModelPiece):
    """A change of a model that patches the forwards of many of its modules.

    Args:
        noun: what the modules are, "MLP".
        function: runs in place of their forwards.
        is_suited: whether a module is of that kind. Wrappers around such modules may
            be, too.

    Attributes:
        n_changed: how many modules were patched.
    """

    def __init__(
        self,
        noun: str,
        function: Replacement,
        is_suited: Callable[[torch.nn.Module], bool],
    ) -> None:
        self._noun = noun
        self._function = function
        self._is_suited = is_suited
        self.n_changed = 0

    def why_lost(self, model: torch.nn.Module) -> str | None:
        """Look for modules that run another forward. Modules that the model has no
        longer do not count."""
        n_running = 0
        n_plain = 0
        for module in model.modules():
            if runs(module, self._function):
                n_running += 1
            elif self._is_suited(module):
                n_plain += 1
        n_others = min(n_plain, self.n_changed - n_running)
        if n_others <= 0:
            return None
        return f"{counted(n_others, self._noun)} got another forward"

    def undo(self, model: torch.nn.Module) -> None:
        """Give all modules their forward back."""
        unpatch_all(model, self._function)


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether the module runs the forward that its class was written with, or ours
    around that."""
    kind = plain_class(module)
    author = next(parent for parent in kind.__mro__ if "forward" in vars(parent))
    if (
        kind.forward.__module__ != author.__module__
    ):  # Liger's and Unsloth's, of all models
        return False
    forward = _forward_in_module(module)
    # Libraries that took their forward back left a method of the class behind.
    class_forwards = (kind.forward, type(module).forward)
    return forward is None or getattr(forward, "__func__", None) in class_forwards


def _forward_in_module(module: torch.nn.Module) -> Any:
    """Return the forward that was put into the module itself, or None if its class has
    it."""
    if is_run_by_hooks(module):
        return forward_in_hooks(module)
    return vars(module).get("forward")


def _is_bound_forward(module: torch.nn.Module, forward: Any) -> bool:
    """Whether a forward in a module is that of its class, which libraries leave behind,
    or was compiled of that."""
    return getattr(as_written(forward), "__func__", None) is type(module).forward


def _drop_forward(module: Any) -> None:
    """Let a module run the forward of its class: one in the module would hide it."""
    if is_run_by_hooks(module):
        replace_forward_in_hooks(module, MethodType(type(module).forward, module))
    else:
        vars(module).pop("forward", None)


@cache
def _changed_class(change: _Patch) -> type[torch.nn.Module]:
    """Return the subclass with a replaced method. Equal changes share a class."""
    base = change.base
    method = change.method
    function = change.function
    options = change.options

    def changed(self: torch.nn.Module, *args: Any, **named: Any) -> Any:
        return function(*options, getattr(base, method), self, *args, **named)

    # torch's compiler counts recompilations by code, and gives up after eight: each
    # class has its own.
    changed.__code__ = changed.__code__.replace()
    wraps(getattr(base, method))(changed)

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        reduced = super(kind, self).__reduce_ex__(max(2, protocol))
        if type(self) is not kind:  # a library has made a subclass of this class
            return reduced
        return (_empty_module, _steps_to(kind), *reduced[2:])

    names = {
        method: changed,
        "__reduce_ex__": reduce,
        _PATCH: change,
        # Libraries store a class by these names and look it up again.
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    kind: type[torch.nn.Module] = type(base.__name__, (base,), names)
    return kind


def _steps_to(kind: type[torch.nn.Module]) -> tuple[Any, ...]:
    """Return the plain class and (method, function, options) of each change: a changed
    class cannot be pickled by its name, which is the plain one's."""
    patches = _patches_of(kind)
    steps = [(change.method, change.function, change.options) for change in patches]
    return (patches[0].base, *steps)


def _empty_module(
    plain: type[torch.nn.Module], *steps: tuple[Any, ...]
) -> torch.nn.Module:
    """Make an empty module of a changed class, for pickle and ``copy``."""
    kind = plain
    for step in steps:
        kind = _changed_class(_Patch(kind, *step))
    return kind.__new__(kind)
