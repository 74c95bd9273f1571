"""What the operators would compute: shapes of results for fake tensors, and counts of
operations.

Functions take the arguments of an operator's schema.
"""

from __future__ import annotations

from typing import Any

import torch

from quorum_attention.kernels.call_shape import state_dtype
from quorum_attention.kernels.result_layout import empty_like_input


def fake_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    parts: list[torch.Tensor] | None,
    dropout_p: float,
    scale: float | None,
    is_causal: bool,
    enable_gqa: bool,
    out_dtype: torch.dtype | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty (out, lse, the number of the settings)."""
    lse_shape = query.shape[:-1]
    out_shape = (*lse_shape, value.shape[-1])
    out = empty_like_input(query, out_shape, out_dtype or query.dtype)
    lse = query.new_empty(lse_shape, dtype=state_dtype(query.dtype))
    settings_number = torch.empty((), dtype=torch.int64, device="cpu")
    return out, lse, settings_number


def fake_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    attn_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    settings_number: torch.Tensor,
    seed: torch.Tensor | None,
    parts: list[torch.Tensor] | None,
    dropout_p: float,
    scale: float | None,
    is_causal: bool,
    enable_gqa: bool,
    out_dtype: torch.dtype | None,
    options: str,
    numbers: list[int] | None,
    of_mask: bool,
    of_sinks: bool,
) -> list[torch.Tensor]:
    """Return empty gradients of query, key and value, then of mask and sinks if
    wanted."""
    grads = [empty_like_input(t, t.shape, t.dtype) for t in (query, key, value)]
    if of_mask:
        assert attn_mask is not None
        grads.append(attn_mask.new_empty(attn_mask.shape))
    if of_sinks:
        assert sinks is not None
        grads.append(sinks.new_empty(sinks.shape))
    return grads


def forward_flops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> int:
    """Count the operations of the two products of a forward.

    All pairs count, whatever is masked, as torch counts those of its own attention.
    """
    n_pairs = _count_pairs(query, key)
    head_dim = query.shape[-1]
    value_dim = value.shape[-1]
    return 2 * n_pairs * (head_dim + value_dim)


def backward_flops(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> int:
    """Count the operations of the five products of a backward.

    Scores and the gradients of query and key go by the head dimension, the gradients of
    values and probabilities by the value's.
    """
    n_pairs = _count_pairs(query, key)
    head_dim = query.shape[-1]
    value_dim = grad_out.shape[-1]
    return 2 * n_pairs * (3 * head_dim + 2 * value_dim)


def _count_pairs(query: torch.Tensor, key: torch.Tensor) -> int:
    """Count the pairs of queries and keys, of all heads and batch entries."""
    n_queries = query.shape[:-1].numel()
    return n_queries * key.shape[-2]
