"""Private names of Accelerate: its hooks around the forward of a module.

``accelerate.hooks.add_hook_to_module`` puts a forward of its own into a module. That
runs the hook ``_hf_hook`` around the forward that the module had, which is kept as
``_old_forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_run_by_hooks(module: torch.nn.Module) -> bool:
    """Whether the module's forward is that of Accelerate's hooks."""
    return hasattr(module, "_hf_hook") and "_old_forward" in vars(module)


def forward_in_hooks(module: torch.nn.Module) -> Any:
    """Return the forward that hooks run."""
    return vars(module)["_old_forward"]


def replace_forward_in_hooks(module: Any, forward: Callable[..., Any]) -> None:
    """Let hooks run another forward. They stay around it: inputs are moved and weights
    are fetched once."""
    module._old_forward = forward


def fetches_weights(module: torch.nn.Module) -> bool:
    """Whether the module's hook fetches weights from elsewhere for each call."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))
