"""Weights that a call lends to a module, which ``torch.func.functional_call`` does.

The module has its own weights again when the call is over. A checkpoint runs the module
a second time after that, and would get gradients of the module's own weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.stateless import (
    _reparametrize_module,
)  # as torch.func.functional_call

from quorum_attention.recipes.patching import swapping


def with_lent_weights(
    module: torch.nn.Module, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``function`` such that each run of it has the weights that ``module`` has
    now, if they are lent.

    Args:
        module: the module.
        function: runs the module.
    """
    lent: dict[str, torch.Tensor] = {
        name: weight
        for name, weight in module.named_parameters()
        if not isinstance(weight, torch.nn.Parameter)
    }
    if not lent:
        return function

    def run(*inputs: Any) -> Any:
        with swapping, _reparametrize_module(module, lent, tie_weights=True):
            return function(*inputs)

    return run
