"""Layers of a cache of Transformers as they are saved, and restored from that."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from quorum_attention.execution.device.lookup import on_host
from quorum_attention.integrations.transformers.layer_kinds import layer_kind
from quorum_attention.integrations.transformers_private import CONFIG_NOTES
from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.save import SavedLayer
from quorum_attention.long_prompts.segmented_cache import SegmentedCache
from quorum_attention.long_prompts.segments import Segment, concatenate

# Entries of a configuration that change neither keys nor values.
_VOLATILE = frozenset(
    {
        *CONFIG_NOTES,
        "architectures",
        "attn_implementation",
        "transformers_version",
        "use_cache",
    }
)


def fingerprint(config: Any) -> str:
    """Return a checksum of what a configuration says about keys and values, and their
    dtype."""
    decoder_config = config.get_text_config(decoder=True)
    entries = decoder_config.to_dict()
    for name in _VOLATILE:
        entries.pop(name, None)
    text = json.dumps(entries, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def saved_layer(layer: Any) -> SavedLayer:
    """Return what is saved of a layer.

    Raises:
        NotImplementedError: a layer of a kind that cannot be saved.
    """
    kind = _kind_of(layer)
    if kind == "full":
        return SavedLayer(kind, layer.tokens.segments())
    if kind == "none":
        return SavedLayer(kind)
    segments = []
    if layer.is_initialized and layer.cumulative_length:
        segments = [Segment(layer.keys, layer.values, Place.DEVICE)]
    return SavedLayer(kind, segments, {"cumulative_length": layer.cumulative_length})


def _kind_of(layer: Any) -> str:
    kind = layer_kind(layer)
    if kind is None:
        raise NotImplementedError(
            f"a cache with a {type(layer).__name__} cannot be saved or loaded"
        )
    return kind


def restore_layer(layer: Any, saved: SavedLayer, places: CachePlaces) -> None:
    """Put what was saved of a layer into an empty one.

    Args:
        layer: of the same kind.
        saved: its segments lie in files.
        places: on a GPU, tokens are copied to it and to host memory as far as these
            have room.

    Raises:
        ValueError: the layer is of another kind.
    """
    kind = _kind_of(layer)
    if kind != saved.kind:
        raise ValueError(
            f"the saved cache has a layer {saved.kind!r} where this has {kind!r}"
        )
    if not saved.segments:
        return
    if kind == "full":
        for segment in saved.segments:
            _restore_segment(layer.tokens, segment, places)
        layer.dtype = layer.tokens.dtype
        layer.is_initialized = True
    if kind == "sliding":
        key, value = concatenate(saved.segments, places.device)
        layer.lazy_initialization(key, value)
        layer.keys = key
        layer.values = value
        layer.cumulative_length = saved.numbers["cumulative_length"]


def _restore_segment(
    tokens: SegmentedCache, segment: Segment, places: CachePlaces
) -> None:
    n_bytes_free = max(places.remaining(Place.DEVICE), places.remaining(Place.HOST))
    is_copied = not on_host(places.device) and segment.nbytes < n_bytes_free
    if is_copied and segment.entries is None:
        tokens.append(segment.key, segment.value)
    else:
        tokens.adopt(segment)
