"""The inner kernels of random calls, made once: caches keep what they are keyed by."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from helpers.attention import attention, gradients

import quorum_attention as qa
from quorum_attention.kernels.kit import (
    from_lse_function,
    from_score_mod,
    sliding_window,
)
from random_calls.case import Case, Scores
from random_calls.tensors import slopes_of

# Kernels that tests plant, by name.
PLANTED: dict[str, Any] = {}


def kernel_of(case: Case, device: torch.device) -> Any:
    """What to hand over as ``kernel=``."""
    if case.kernel in PLANTED:
        return PLANTED[case.kernel]
    if case.kernel.startswith("function"):
        return _function(case.kernel == "function explicit")
    if "scores" in case.kernel:
        heads = case.heads if case.scores.alibi else 0
        return _scores(case.kernel == "native scores", case.scores, heads, str(device))
    return case.kernel


def _wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """Computed in fp32 at the least."""

    def wide(*tensors, is_causal, scale):
        work = torch.promote_types(tensors[0].dtype, torch.float32)
        return function(
            *(t.to(work) for t in tensors), is_causal=is_causal, scale=scale
        )

    return wide


@cache
def _function(explicit: bool) -> Any:
    return from_lse_function(
        _wide(attention), backward=_wide(gradients) if explicit else None
    )


@cache
def _scores(native: bool, scores: Scores, heads: int, device: str) -> Any:
    slopes = slopes_of(heads).to(device) if heads else None
    if native:
        return qa.NativeKernel(
            window=scores.window, softcap=scores.softcap, alibi_slopes=slopes
        )

    def modified(score, b, h, q, k):
        if scores.softcap is not None:
            score = scores.softcap * torch.tanh(score / scores.softcap)
        if slopes is not None:
            score = score - slopes[h].to(score.dtype) * (q - k).abs()
        return score

    plain = scores.softcap is None and slopes is None
    mask = None if scores.window is None else sliding_window(*scores.window)
    return from_score_mod(None if plain else modified, mask, compiled=False)
