"""Batch entries of the layers that Transformers' caches have for recurrences.

Such a layer has no methods that repeat and select its entries, or inherits methods that
do so with keys and values alone. Its ``reorder_cache`` does either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# The attributes that hold the states of recurrences and convolutions.
_STATES = ("conv_states", "recurrent_states")


def change_layer(layer: Any, method: str, argument: Any) -> None:
    """Call a method of a cache's layer that is not in segments.

    Args:
        layer: of any kind.
        method: "reorder_cache", "batch_repeat_interleave", "batch_select_indices" or
            "crop".
        argument: what the method is given.
    """
    states = _states_of(layer)
    if states and method == "batch_repeat_interleave":
        entries = torch.arange(states[0].shape[0]).repeat_interleave(argument)
        layer.reorder_cache(entries)
    elif states and method == "batch_select_indices":
        layer.reorder_cache(_entries(argument))
    elif states or hasattr(layer, method):  # else there is nothing to change yet
        getattr(layer, method)(argument)


def _states_of(layer: Any) -> list[torch.Tensor]:
    """The states of a layer, (batch, ...) each; none before the first tokens."""
    leaves = tree_leaves([getattr(layer, name, None) for name in _STATES])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _entries(indices: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Numbers of entries; of a bool tensor, those where it is True."""
    entries = torch.as_tensor(indices)
    return entries.nonzero().flatten() if entries.dtype == torch.bool else entries
