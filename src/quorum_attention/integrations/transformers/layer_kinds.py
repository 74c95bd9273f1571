"""The kinds of layers of a cache that keep keys and values, and nothing else."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicSlidingWindowLayer

from quorum_attention.integrations.transformers.segmented_layer import SegmentedLayer


def layer_kind(layer: Any) -> str | None:
    """Return "full" for a layer with keys and values of all tokens, "sliding" for one
    with those of the last tokens, and "none" for one that keeps nothing; None: the
    layer keeps something else, such as the state of a recurrence."""
    if isinstance(layer, SegmentedLayer):
        return "full"
    if type(layer) is DynamicSlidingWindowLayer:
        return "sliding"
    if type(layer).__name__ == "DummyLayer":  # which older versions do not have
        return "none"
    return None
