"""Weights that a module has for a while: those that a call lends to it, which
``torch.func.functional_call`` does, and those of its own call that runs later.

The module has its own weights again when the call is over. A checkpoint runs the module
a second time after that, and would get gradients of the module's own weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils.stateless import (
    _reparametrize_module,
)  # as torch.func.functional_call

from quorum_attention.kernels.tensors import NamedTensors

# Calls of other threads wait, or a module might keep the weights.
_swapping = threading.RLock()


@contextmanager
def weights_swapped(module: torch.nn.Module, tensors: NamedTensors) -> Iterator[None]:
    """Let a module have other parameters and buffers, by name."""
    with _swapping, _reparametrize_module(module, tensors, tie_weights=True):
        yield


def with_lent_weights(
    module: torch.nn.Module, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``function`` such that each run of it has the weights that ``module`` has
    now, if they are lent.

    Args:
        module: the module.
        function: runs the module.
    """
    lent: NamedTensors = {
        name: weight
        for name, weight in module.named_parameters()
        if not isinstance(weight, torch.nn.Parameter)
    }
    if not lent:
        return function

    def run(*inputs: Any) -> Any:
        with weights_swapped(module, lent):
            return function(*inputs)

    return run
