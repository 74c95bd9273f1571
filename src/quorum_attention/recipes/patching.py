"""A module changed for a while or for good: evaluation mode, and another ``forward``.

Others replace forwards too: libraries of kernels, offloading, adaptation by hand. A module whose
forward somebody has replaced is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

_OURS = "_quorum_attention_recipe"


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
    """Whether the module runs the forward of its class, or ours around that."""
    found = vars(module).get("forward")
    of_class = getattr(found, "__func__", None) is type(module).forward  # as in a model unpickled
    return found is None or of_class or hasattr(found, _OURS)


def patch_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Let the module run ``forward(module, ...)``."""
    setattr(forward, _OURS, True)
    # Bound to the module, so that a copy of the module gets one bound to itself.
    module.forward = MethodType(forward, module)


__all__ = ["eval_mode", "has_own_forward", "patch_forward"]
