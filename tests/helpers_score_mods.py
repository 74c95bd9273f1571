"""Score and mask modifications to recover, and what they come to in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quorum_attention.kernels.kit import document, prefix_lm, sliding_window
from quorum_attention.kernels.masked.geometry import BlockMask, FunctionRule, Geometry

Case = tuple[Any, Any, bool]


def softcap(score, b, h, q, k):  # type: ignore[no-untyped-def]
    return 2.0 * torch.tanh(score / 2.0)


def local_global(b, h, q, k):  # type: ignore[no-untyped-def]
    """Gemma's: one head sees a window, the others everything."""
    return (h >= 1) | ((q - k).abs() <= 20)


def within(q0: int, q1: int, k0: int, k1: int) -> BlockMask:
    """Keep the pairs of some neighbouring queries and keys."""
    inside = FunctionRule(lambda b, h, q, k: (q >= q0) & (q < q1) & (k >= k0) & (k < k1))
    return BlockMask(Geometry(blocks=np.array([[q0, q1, k0, k1]]), same=(inside,)))


def cases(n: int, device: str = "cpu") -> dict[str, Case]:
    """(score_mod, mask_mod, is_causal) by name, for ``n`` tokens of 2 heads or 4."""
    slopes = torch.tensor([0.1, 0.02, 0.05, 0.01], dtype=torch.float64, device=device)
    ids = torch.arange(n) * 7 // n

    def alibi(score, b, h, q, k):  # type: ignore[no-untyped-def]
        return score - slopes[h].to(score.dtype) * (q - k).abs()

    return {
        "alibi": (alibi, None, True),
        "soft cap": (softcap, None, False),
        "window": (None, sliding_window(40, 0), False),
        "window by a function": (None, lambda b, h, q, k: (q - k <= 30) & (k <= q), False),
        "documents": (None, document(ids), True),
        "documents, plain": (None, document(ids), False),
        "prefix": (None, prefix_lm(50), False),
        "local and global heads": (None, local_global, True),
        "soft cap, alibi and window": (
            lambda s, b, h, q, k: alibi(softcap(s, b, h, q, k), b, h, q, k), sliding_window(60, 5),
            False,
        ),
    }  # fmt: skip


def reference(query, key, value, case: Case):  # type: ignore[no-untyped-def]
    """(out, lse) of every score, differentiable; key heads may be fewer."""
    score_mod, mask_mod, is_causal = case
    shared = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
    device = query.device
    q = torch.arange(query.shape[2], device=device)[:, None]
    k = torch.arange(key.shape[2], device=device)[None]
    scores = query @ key.mT * query.shape[-1] ** -0.5
    h = torch.arange(query.shape[1], device=device)[:, None, None]
    b = torch.zeros((), dtype=torch.int64, device=device)
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, k)
    keep = torch.ones(query.shape[1], *scores.shape[-2:], dtype=torch.bool, device=device)
    if mask_mod is not None:
        keep = keep & mask_mod(b, h, q, k)
    if is_causal:
        keep = keep & (q >= k)
    scores = scores.masked_fill(~keep, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(scores - finite.unsqueeze(-1)) @ value, lse
