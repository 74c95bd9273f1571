"""A step of decoding: one query. Its scores are no larger than the keys, so nothing is cut."""

from __future__ import annotations

from typing import Any

import torch


def one_query(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    position_bias: torch.Tensor | None,
) -> torch.Tensor:
    """(batch, 1, heads, value_dim): SDPA, or what SDPA has not: a soft cap and sinks.

    Args:
        query: (batch, heads, 1, head_dim); key, value: (batch, kv_heads, keys, head_dim).
        mask: boolean or additive, (batch, 1 or heads, 1, keys).
        sinks: (heads,).
        position_bias: (1 or batch, heads, 1, keys), added to the scores.
    """
    if mask is not None:
        mask = mask[..., : key.shape[2]]
    if softcap is None and sinks is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: tuple[torch.Tensor, Any] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False,
            position_bias=position_bias,
        )  # fmt: skip
        return result[0]
    batch, heads, _, dim = query.shape
    shared = heads // key.shape[1]
    grouped = query.reshape(query.shape[0], key.shape[1], shared, dim)
    scores = (grouped @ key.mT).reshape(batch, heads, 1, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1).expand(batch, -1, 1, 1).to(scores.dtype)
        weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1).nan_to_num()  # a row without a key is 0
    weights = torch.nn.functional.dropout(weights.to(value.dtype), dropout, training=dropout > 0)
    out = weights.reshape(batch, key.shape[1], shared, -1) @ value
    return out.reshape(batch, heads, 1, -1).transpose(1, 2).contiguous()


__all__ = ["one_query"]
