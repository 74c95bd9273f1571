"""Attention of a few queries over the segments of a cache, each computed where it lies.

The segments are disjoint sets of keys, so their results are merged by log-sum-exp (kernels/merge).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quorum_attention.kernels.merge import empty_, merge_
from quorum_attention.kernels.sinks import join_sinks_
from quorum_attention.long_prompts.segments import Segment


def attend_segments(
    query: torch.Tensor,
    segments: Sequence[Segment],
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    key_padding: torch.Tensor | None = None,
    is_causal: bool = True,
) -> torch.Tensor:
    """Compute the attention of the last tokens over all tokens of a cache.

    The last query stands at the last key, the query before at the key before, and so on. A row
    without a kept key has output 0.

    Args:
        query: (b, h_q, n_q, d); h_q is a multiple of h_kv.
        segments: all n_k tokens in order of position, on any devices.
        softmax_scale: scores are multiplied by this; None: 1 / sqrt(d).
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: (h_q,) logits that take part in the softmax without a value.
        window: keep keys less than this many tokens before the query; None: no limit.
        key_padding: (b, n_k) bool: keep keys where it is True.
        is_causal: keep keys at or before the query alone.

    Returns:
        (b, h_q, n_q, d_v), in the query's dtype and on its device.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    n_keys = sum(segment.n_tokens for segment in segments)
    scale = 1 / math.sqrt(query.shape[3]) if softmax_scale is None else softmax_scale
    state_dtype = torch.promote_types(query.dtype, torch.float32)
    value_dim = segments[0].value.shape[3]
    out = query.new_empty((*query.shape[:3], value_dim), dtype=state_dtype)
    lse = query.new_empty(query.shape[:3], dtype=state_dtype)
    empty_(out, lse)
    first_position = n_keys - query.shape[2]
    positions = torch.arange(first_position, n_keys, device=query.device)[:, None]
    start = 0
    for segment in segments:
        stop = start + segment.n_tokens
        keys = torch.arange(start, stop, device=query.device)
        is_kept = torch.ones_like(positions * keys, dtype=torch.bool)
        if is_causal:
            is_kept &= keys <= positions
        if window is not None:
            is_kept &= keys > positions - window
        is_kept = is_kept[None, None]
        if key_padding is not None:
            is_kept = is_kept & key_padding[:, None, None, start:stop]
        key, value = (tensor.to(query.device) for tensor in segment.expanded())
        group = query.shape[1] // key.shape[1]
        key = key.to(state_dtype).repeat_interleave(group, dim=1)
        value = value.to(state_dtype).repeat_interleave(group, dim=1)
        scores = query.to(state_dtype) @ key.mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~is_kept, -torch.inf)
        lse_i = scores.logsumexp(dim=-1)
        weights = (scores - lse_i.unsqueeze(-1)).exp().nan_to_num()
        merge_(out, lse, weights @ value, lse_i)
        start = stop
    if sinks is not None:
        join_sinks_(out, lse, sinks.to(lse))
    return out.to(query.dtype)
