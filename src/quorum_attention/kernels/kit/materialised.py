"""FlexAttention's result with materialised scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quorum_attention.kernels.kit.masks import MaskMod
from quorum_attention.kernels.kit.over_pairs import over_pairs

ScoreMod = Callable[[Any, Any, Any, Any, Any], torch.Tensor]


def materialised(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's (out, lse) with materialised scores; differentiable.

    It is used where FlexAttention has no backward (on the CPU) or no kernel (for float64).
    Modifications may be written for single numbers, as in FlexAttention: they are mapped over all
    pairs.

    Args:
        query, key, value: (b, h, nq, d), (b, hk, nk, d), (b, hk, nk, dv), any floating dtype.
        score_mod, mask_mod: get indices into these tensors, not global positions.
        scale: factor of the scores.

    Returns:
        out (b, h, nq, dv) in the input dtype, lse (b, h, nq) in fp32 or fp64, -inf in rows that
        keep nothing.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
    work = torch.promote_types(query.dtype, torch.float32)
    scores = scale * (query.to(work) @ key.to(work).mT)
    at = [torch.arange(size, device=query.device) for size in scores.shape]
    if score_mod is not None:
        scores = over_pairs(score_mod, scored=True)(scores, *at).to(work)
    if mask_mod is not None:
        kept = over_pairs(mask_mod)(*at)
        scores = scores.masked_fill(~kept, -torch.inf)
        # In a row that keeps nothing, any finite lse makes all probabilities 0.
        some = kept.any(dim=-1)
        lse = torch.logsumexp(scores.masked_fill(~some.unsqueeze(-1), 0.0), dim=-1)
        p = torch.exp(scores - lse.unsqueeze(-1))
        lse = lse.masked_fill(~some, -torch.inf)
    else:
        lse = torch.logsumexp(scores, dim=-1)
        p = torch.exp(scores - lse.unsqueeze(-1))
    return (p @ value.to(work)).to(query.dtype), lse
