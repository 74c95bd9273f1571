"""Changes of a model: another ``forward`` for a module, and what was changed or left out, and why.

Others replace forwards too: libraries of kernels, offloading, adaptation by hand. A module whose
forward somebody has replaced is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

_OURS = "_quorum_attention_recipe"


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


@dataclass(frozen=True)
class Summary:
    """All changes, in the order in which they were tried."""

    changes: tuple[Change, ...]

    @property
    def done(self) -> tuple[str, ...]:
        """Names of the changes that were made."""
        return tuple(change.name for change in self.changes if change.done)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the changes that were not made."""
        return tuple(change.name for change in self.changes if not change.done)

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes))


@contextmanager
def eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """The module in evaluation; afterwards each part has its own mode again."""
    trained = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in trained:
            part.training = True


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether the module runs the forward that its class was written with, or ours around that."""
    found, kind = vars(module).get("forward"), type(module)
    of_class = getattr(found, "__func__", None) is kind.forward  # as in a model unpickled
    (written, *_) = (one for one in kind.__mro__ if "forward" in vars(one))
    if kind.forward.__module__ != written.__module__:  # Liger's and Unsloth's, of all models
        return False
    return found is None or of_class or hasattr(found, _OURS)


def patch_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Let the module run ``forward(module, ...)``."""
    setattr(forward, _OURS, True)
    forward.__name__ = "forward"  # what a pickled module looks up in its class
    # Bound to the module, so that a copy of the module gets one bound to itself.
    module.forward = MethodType(forward, module)


__all__ = ["Change", "Summary", "eval_mode", "has_own_forward", "patch_forward"]
