"""The inner kernels of random calls, made once: caches keep what they are keyed by."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from random_calls.case import Case, Scores

# Kernels that tests plant, by name.
PLANTED: dict[str, Any] = {}


def kernel_of(case: Case, slopes: torch.Tensor | None) -> Any:
    """What to hand over as ``kernel=``."""
    if case.kernel in PLANTED:
        return PLANTED[case.kernel]
    if case.kernel == "function":
        return _function(False)
    if case.kernel == "function explicit":
        return _function(True)
    if case.kernel in ("scores", "native scores"):
        device = "cpu" if slopes is None else str(slopes.device)
        return _scores(case.kernel, case.scores, case.heads if slopes is not None else 0, device)
    return case.kernel


def _scored(query, key, is_causal, scale):  # type: ignore[no-untyped-def]
    work = torch.promote_types(query.dtype, torch.float32)
    scores = scale * (query.to(work) @ key.to(work).mT)
    if is_causal:
        shape = scores.shape[-2:]
        later = torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _attention(query, key, value, *, is_causal, scale):  # type: ignore[no-untyped-def]
    scores = _scored(query, key, is_causal, scale)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value.to(scores.dtype), lse


def _gradients(grad_out, query, key, value, out, lse, *, is_causal, scale):  # type: ignore[no-untyped-def]
    scores = _scored(query, key, is_causal, scale)
    q, k, v, do, o = (t.to(scores.dtype) for t in (query, key, value, grad_out, out))
    p = torch.exp(scores - lse.unsqueeze(-1))
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
    return scale * (ds @ k), scale * (ds.mT @ q), p.mT @ do


def uncut(  # type: ignore[no-untyped-def]
    kernel: str, query, key, value, grad_out, *, is_causal, scale
) -> tuple[torch.Tensor, ...]:
    """What the functions of "function" and "function explicit" make of a whole call: out and lse,
    and with ``grad_out`` the gradients of query, key and value."""
    shared = query.shape[-3] // max(1, key.shape[-3])
    q, k, v = (t.detach().clone().requires_grad_() for t in (query, key, value))
    every = [t.repeat_interleave(shared, -3) for t in (k, v)]
    said = {"is_causal": is_causal, "scale": scale}
    out, lse = _attention(q, *every, **said)
    found = (out.detach(), lse.detach())
    if grad_out is None:
        return found
    if kernel == "function":
        return *found, *torch.autograd.grad(out, (q, k, v), grad_out.to(out.dtype))
    with torch.no_grad():
        by_query, *by_key = _gradients(grad_out, q, *every, *found, **said)
    return *found, by_query, *(t.unflatten(-3, (-1, shared)).sum(-3) for t in by_key)


@cache
def _function(explicit: bool) -> Any:
    from quorum_attention.kernels.kit import from_lse_function

    return from_lse_function(_attention, backward=_gradients if explicit else None)


@cache
def _scores(kind: str, scores: Scores, heads: int, device: str) -> Any:
    import quorum_attention as qa
    from quorum_attention.kernels.kit import from_score_mod, sliding_window

    slopes = None
    if heads:
        slopes = torch.rand(heads, generator=torch.Generator().manual_seed(3)) * 0.2
        slopes = slopes.to(device)
    if kind == "native scores":
        return qa.NativeKernel(window=scores.window, softcap=scores.softcap, alibi_slopes=slopes)

    def modified(score, b, h, q, k):  # type: ignore[no-untyped-def]
        if scores.softcap is not None:
            score = scores.softcap * torch.tanh(score / scores.softcap)
        if slopes is not None:
            score = score - slopes[h].to(score.dtype) * (q - k).abs()
        return score

    plain = scores.softcap is None and slopes is None
    mask = None if scores.window is None else sliding_window(*scores.window)
    return from_score_mod(None if plain else modified, mask, compiled=False)
