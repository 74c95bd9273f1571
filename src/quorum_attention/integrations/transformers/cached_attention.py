"""Attention of a model's layer over a cache in segments."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

from quorum_attention.integrations.transformers.masks import DescribedMask
from quorum_attention.integrations.transformers.segmented_tensor import SegmentedTensor
from quorum_attention.long_prompts.attend import attend_segments
from quorum_attention.long_prompts.key_mask import KeyMask
from quorum_attention.long_prompts.places import Place
from quorum_attention.mask import Mask

_FIELDS = frozenset({"causal", "offset", "window", "key_padding"})


def cached_pairs(
    attention_mask: torch.Tensor | DescribedMask | BlockMask | None,
    query: torch.Tensor,
    n_keys: int,
) -> KeyMask | None:
    """Return the pairs that a model's mask keeps; None if they cannot be said so.

    Args:
        attention_mask: as attention functions of Transformers get it.
        query: (b, h_q, n_q, d).
        n_keys: how many keys there are.
    """
    batch, _, n_queries, _ = query.shape
    if isinstance(attention_mask, DescribedMask):
        if attention_mask.shape[2:] != (n_queries, n_keys):
            return None
        return _pairs_of_mask(attention_mask.on(query.device), query, n_keys)
    if n_queries != 1 or isinstance(attention_mask, BlockMask):
        return None
    if attention_mask is None:
        return KeyMask(n_queries, n_keys)
    is_padding = attention_mask.dtype == torch.bool and attention_mask.shape[1:3] == (
        1,
        1,
    )
    if not is_padding or attention_mask.shape[3] < n_keys:
        return None
    key_padding = attention_mask[:, 0, 0, :n_keys].expand(batch, n_keys)
    return KeyMask(n_queries, n_keys, key_padding=key_padding)


def _pairs_of_mask(mask: Mask, query: torch.Tensor, n_keys: int) -> KeyMask | None:
    if not mask.set_fields().keys() <= _FIELDS:
        return None
    batch, _, n_queries, _ = query.shape
    n_before, n_behind = mask.sides
    is_placed = bool(mask.causal) or n_before != -1
    if n_behind != -1 or (is_placed and (mask.offset or 0) != n_keys - n_queries):
        return None
    padding = mask.key_padding
    return KeyMask(
        n_queries,
        n_keys,
        is_causal=bool(mask.causal),
        window=None if n_before == -1 else n_before + 1,
        key_padding=None if padding is None else padding.expand(batch, n_keys),
    )


def attend_cached(
    query: torch.Tensor,
    key: SegmentedTensor,
    pairs: KeyMask,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend over the segments that ``key`` stands for.

    Args:
        query: (b, h_q, n_q, d).
        key: of a layer's cache.
        pairs: which are kept.
        scaling, softcap: of the scores.
        sinks: (h_q,) or None.

    Returns:
        (b, h_q, n_q, d_v).
    """
    layer = key.layer
    is_read_ahead = any(segment.place is not Place.DEVICE for segment in layer.segments)
    return attend_segments(
        query,
        layer.segments,
        softmax_scale=scaling,
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach().flatten(),
        window=pairs.window,
        key_padding=pairs.key_padding,
        is_causal=pairs.is_causal,
        sharing=layer.sharing,
        next_segments=layer.next_segments() if is_read_ahead else (),
    )
