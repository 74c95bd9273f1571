"""Weights that a module has for a while: those that a call lends to it, which
``torch.func.functional_call`` does, and those of its own call that runs later.

The module has its own weights again when the call is over. A checkpoint runs the module
a second time after that, and would get gradients of the module's own weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.utils.stateless import (
    _reparametrize_module,
)  # as torch.func.functional_call

from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.kernels.torch_private import end_contexts

# Calls of other threads wait, or a module might keep the weights.
_swapping = threading.RLock()


def run_with_weights(
    module: torch.nn.Module,
    tensors: NamedTensors,
    function: Callable[..., Any],
    *inputs: Any,
) -> Any:
    """Return ``function(*inputs)``, for which a module has other parameters and
    buffers.

    Args:
        module: the module.
        tensors: the parameters and buffers, by name.
        function: runs the module.
        inputs: of ``function``.
    """
    with _swapping:
        holders = _tensor_holders(module)
        before = [dict(holder) for holder in holders]
        try:
            with _reparametrize_module(module, tensors, tie_weights=True):
                return function(*inputs)
        except BaseException as error:
            end_contexts(error)
            # Torch forgets what it has swapped when an interrupt comes meanwhile.
            for holder, tensors_before in zip(holders, before, strict=True):
                holder.update(tensors_before)
            raise


def _tensor_holders(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the dictionaries of parameters and of buffers of a module and its
    parts."""
    holders: list[dict[str, Any]] = []
    for part in module.modules():
        holders += [part._parameters, part._buffers]
    return holders


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

    return partial(run_with_weights, module, lent, function)
