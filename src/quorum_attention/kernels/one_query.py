"""Attention of one query over all keys, as each token of an answer needs it.

On some GPUs torch's SDPA gives such calls to cuDNN, which makes a plan for every number
of keys. A plan takes the host tens of milliseconds for each token. FlashAttention-2
makes no plans, and reads a key once for all query heads that share it. Where it does
not run, these heads become the queries of one head: with SDPA's own grouped heads a CPU
reads keys for each of them.
"""

from __future__ import annotations

from functools import cache

import torch

from quorum_attention.kernels.limits import GRID_BLOCKS
from quorum_attention.kernels.operator_inputs import HALF_DTYPES
from quorum_attention.kernels.torch_private import flash_implementation

_MAX_HEAD_DIM = 256
_HEAD_DIM_STEP = 8
# The first NVIDIA GPUs that torch's FlashAttention-2 runs on.
_MIN_CAPABILITY = (8, 0)


def attend_one_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend over all keys.

    Args:
        query: (b, h_q, 1, d); h_q is a multiple of h_kv.
        key, value: (b, h_kv, n, d) and (b, h_kv, n, d_v).
        bias: (b, 1, 1, n), bool: which keys are kept; or added to the scores; None:
            neither.
        scale: of the scores; None: 1 / sqrt(d).
        dropout: the probability that a weight becomes 0.

    Returns:
        (b, h_q, 1, d_v).
    """
    if bias is None and dropout == 0.0 and _is_for_flash(query, key, value):
        results = torch.ops.aten._scaled_dot_product_flash_attention(
            query,
            key,
            value,
            0.0,  # dropout
            False,  # not causal
            False,  # no debug mask
            scale=scale,
        )
        out: torch.Tensor = results[0]
        return out
    batch, heads, _, head_dim = query.shape
    key_heads = key.shape[1]
    grouped_query = query.reshape(
        batch,
        key_heads,
        heads // key_heads,
        head_dim,
    )
    grouped_out = torch.nn.functional.scaled_dot_product_attention(
        grouped_query, key, value, attn_mask=bias, dropout_p=dropout, scale=scale
    )
    return grouped_out.reshape(
        batch,
        heads,
        1,
        value.shape[3],
    )


def _is_for_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's FlashAttention-2 computes such a call."""
    if (
        not query.is_cuda
        or query.dtype not in HALF_DTYPES
        or torch.compiler.is_compiling()
    ):
        return False
    batch, heads, _, head_dim = query.shape
    if (
        value.shape[3] != head_dim
        or head_dim % _HEAD_DIM_STEP
        or head_dim > _MAX_HEAD_DIM
    ):
        return False
    if key.shape[2] == 0 or not 0 < batch * heads <= GRID_BLOCKS:
        return False
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return False
    return _has_flash(query.device) and flash_implementation() is None


@cache
def _has_flash(device: torch.device) -> bool:
    is_nvidia = torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
