"""Attention of rows over keys by its equations, in torch's own operations, on any
device.

It takes every mask, head dimension and dtype. Faster ways take what they can.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.kernels.limits import runs
from quorum_attention.kernels.operator_call import OutLse
from quorum_attention.long_prompts.running_statistics import RunningStatistics

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


def attend_by_equations(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: ScoreScaling,
    is_kept: torch.Tensor | None = None,
) -> OutLse:
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
    state = RunningStatistics(rows, value.shape[3])
    for keys in runs(slice(0, key.shape[2]), _KEYS_AT_ONCE):
        key_block = key[:, :, keys]
        value_block = value[:, :, keys]
        pairs = None if is_kept is None else is_kept[..., keys]
        state.merge(*_attend_block(rows, key_block, value_block, scaling, pairs))
    return state.results()


def _attend_block(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: ScoreScaling,
    is_kept: torch.Tensor | None,
) -> OutLse:
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
