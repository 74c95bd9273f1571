"""A module's ``forward``, replaced by one of ours that calls the one of its class.

Others replace it too: libraries of kernels, what moves weights between devices, whoever adapts a
layer by hand. Theirs would be passed over without a word, so such a module is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

_OURS = "_quorum_attention_recipe"


def forward_is_its_own(module: torch.nn.Module) -> bool:
    """Whether the module runs the forward of its class, or the one of ours around that."""
    found = vars(module).get("forward")
    of_class = getattr(found, "__func__", None) is type(module).forward  # as in a model unpickled
    return found is None or of_class or hasattr(found, _OURS)


def put_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Let the module run ``forward(module, ...)``."""
    setattr(forward, _OURS, True)
    # Bound to the module, so that a copy of the module gets one bound to itself.
    module.forward = MethodType(forward, module)


__all__ = ["forward_is_its_own", "put_forward"]
