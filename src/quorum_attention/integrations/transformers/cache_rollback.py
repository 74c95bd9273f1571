"""A cache of Transformers that is as it was before, if a forward ends with an error.

An interrupt, or a device without memory, ends a forward between two layers: some have
the new tokens, and others do not. The next forward would compute wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import Cache

from quorum_attention.integrations.transformers.segmented_layer import SegmentedLayer
from quorum_attention.plain_types import Keywords

# Tensors (..., tokens, width) that layers put new tokens behind: the old tensor is let
# go of. A layer that counts its tokens does not keep all of them.
_GROWING = ("keys", "values", "indexer_keys")
_COUNT = "cumulative_length"
# A layer with states of a recurrence writes to their tensors.
_STATES = "recurrent_states"


@contextmanager
def restored_on_error(cache: Cache) -> Iterator[None]:
    """Give each layer of a cache back what it has now, if the block ends with an error.

    Nothing with a row for each token is copied or kept; states of recurrences are
    copied, and windows are kept.
    """
    # Caches of an encoder and a decoder have none.
    layers = getattr(cache, "layers", [])
    undo = [_undo_of(layer) for layer in layers]
    try:
        yield
    except BaseException:
        # A cache without a configuration gets its layers with the first tokens.
        del layers[len(undo) :]
        for restore in undo:
            restore()
        raise


def _undo_of(layer: Any) -> Callable[[], None]:
    """Return what gives a layer back what it has now."""
    if isinstance(layer, SegmentedLayer):
        return partial(_crop, layer, layer.tokens.n_tokens)
    attributes = vars(layer).copy()
    lengths = dict[str, int]()
    if _COUNT not in attributes:
        for name in _GROWING:
            if isinstance(attributes.get(name), torch.Tensor):
                lengths[name] = _length(attributes.pop(name))
    if _STATES in attributes:
        attributes = tree_map_only(torch.Tensor, torch.clone, attributes)
    return partial(_restore, layer, attributes, lengths)


def _length(tensor: torch.Tensor) -> int:
    """The tokens of a growing tensor; one without tokens has a single dimension."""
    return tensor.shape[-2] if tensor.dim() > 1 else 0


def _crop(layer: SegmentedLayer, n_tokens: int) -> None:
    if n_tokens == 0:
        layer.reset()
        return
    layer.shared.forget_copies()
    layer.tokens.crop(n_tokens)


def _restore(layer: Any, attributes: Keywords, lengths: dict[str, int]) -> None:
    """Let a layer have these attributes, and growing tensors of these lengths."""
    for name, length in lengths.items():
        tensor = getattr(layer, name)
        attributes[name] = (
            tensor.narrow(-2, 0, length) if length else tensor.new_empty(0)
        )
    vars(layer).clear()
    vars(layer).update(attributes)
