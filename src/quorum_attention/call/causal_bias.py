"""torch's own description of a causal mask, ``torch.nn.attention.bias.CausalBias``, as a ``Mask``.

It is a tensor by its class alone: of the right shape, on the CPU, and of numbers that nobody wrote.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from quorum_attention.mask import Mask

_USUAL = (type(None), torch.Tensor, torch.nn.Parameter, Mask)


def is_causal_bias(attn_mask: Any) -> bool:
    """Whether a mask is one of torch's ``causal_upper_left`` and ``causal_lower_right``."""
    if type(attn_mask) in _USUAL:
        return False
    # Where nobody has imported it, nobody has one.
    home = sys.modules.get("torch.nn.attention.bias")
    return home is not None and isinstance(attn_mask, home.CausalBias)


def as_mask(attn_mask: Any, query: Any = None, key: Any = None) -> Any:
    """``attn_mask``; a ``Mask`` that says the same if it is torch's ``CausalBias``.

    Args:
        query, key: the call's, (..., tokens, head_dim); None: it is not looked at how long they
            are.

    Raises:
        ValueError: it was made for other lengths.
    """
    if not is_causal_bias(attn_mask):
        return attn_mask
    made = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
    if query is not None and min(len(query.shape), len(key.shape)) >= 2:
        lengths = (query.shape[-2], key.shape[-2])
        if made != lengths:
            raise ValueError(
                f"attn_mask must be made for {lengths[0]} queries and {lengths[1]} keys, got a "
                f"CausalBias for {made[0]} and {made[1]}"
            )
    return Mask(causal="lower_right" if attn_mask.variant.name == "LOWER_RIGHT" else "upper_left")
