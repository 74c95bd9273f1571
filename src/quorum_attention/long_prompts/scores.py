"""Attention of rows over keys by its equations, in torch's own operations, on any
device.

It takes every mask, head dimension and dtype. Faster ways take what they can.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Keys whose scores are made at once.
_KEYS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class ScoreScaling:
    """Changes of the scores before the softmax.

    Attributes:
        softmax_scale: they are multiplied by this.
        softcap: then they become ``softcap * tanh(score / softcap)``; None: they do
            not.
    """

    softmax_scale: float
    softcap: float | None = None


def merge_parts(
    out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the statistics of disjoint sets of keys.

    Args:
        out: (..., parts, rows, d_v), any floating dtype.
        lse: (..., parts, rows), fp32 or fp64.

    Returns:
        out (..., rows, d_v), in the dtype of lse, and lse (..., rows).
    """
    merged_lse = lse.logsumexp(dim=-2)
    # Rows without keys have -inf everywhere, whose difference is NaN.
    differences = lse - merged_lse.unsqueeze(-2)
    weights = differences.exp().nan_to_num(nan=0.0)
    weighted = out.to(lse.dtype) * weights.unsqueeze(-1)
    return weighted.sum(dim=-3), merged_lse


def attend_by_equations(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: ScoreScaling,
    is_kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention and log-sum-exp in fp32, or fp64 for fp64 inputs.

    Args:
        rows: (b, h, r, d) queries.
        key, value: (b, h, n, d) and (b, h, n, d_v).
        scaling: of the scores.
        is_kept: bool that broadcasts to (b, h, r, n): True where a pair is kept; None:
            all are.

    Returns:
        out (b, h, r, d_v) and lse (b, h, r). A row without a kept key, or whose
        scores are all -inf, has 0 and -inf.
    """
    n_keys = key.shape[2]
    parts = []
    for start in range(0, n_keys, _KEYS_AT_ONCE):
        block = slice(start, min(n_keys, start + _KEYS_AT_ONCE))
        key_block = key[:, :, block]
        value_block = value[:, :, block]
        pairs = None if is_kept is None else is_kept[..., block]
        parts.append(_attend_block(rows, key_block, value_block, scaling, pairs))
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    out = torch.stack(outs, dim=2)  # (b, h, parts, r, d_v)
    lse = torch.stack(lses, dim=2)
    return merge_parts(out, lse)


def _attend_block(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: ScoreScaling,
    is_kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(rows.dtype, torch.float32)
    softcap = scaling.softcap
    scores = rows.to(dtype) @ key.to(dtype).mT  # (b, h, r, n)
    scores = scores * scaling.softmax_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if is_kept is not None:
        scores = scores.masked_fill(~is_kept, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    # A row whose scores are all -inf has -inf, and their difference is NaN.
    finite_lse = lse.masked_fill(lse == -torch.inf, 0.0)
    log_weights = scores - finite_lse.unsqueeze(-1)
    return log_weights.exp() @ value.to(dtype), lse
