"""Score and mask modifications to recover, and what they come to in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import quorum_attention as qa
from helpers.attention import Inputs, fresh_generator, masked, softmax
from helpers.passes import both_passes
from quorum_attention.kernels.kit import document, prefix_lm, sliding_window
from quorum_attention.kernels.masked.blocks import Blocks
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.rules import FunctionRule

Case = tuple[Any, Any, bool]


def softcap(score, b, h, q, k):
    return 2.0 * torch.tanh(score / 2.0)


def local_global(b, h, q, k):
    """Gemma's: one head sees a window, the others everything."""
    return (h >= 1) | ((q - k).abs() <= 20)


def within(q0: int, q1: int, k0: int, k1: int) -> Geometry:
    """Keep the pairs of some neighbouring queries and keys."""
    inside = FunctionRule(
        lambda b, h, q, k: (q >= q0) & (q < q1) & (k >= k0) & (k < k1)
    )
    return Geometry(blocks=Blocks(np.array([[q0, q1, k0, k1]])), block_rules=(inside,))


def cases(n: int, device: str = "cpu") -> dict[str, Case]:
    """(score_mod, mask_mod, is_causal) by name, for ``n`` tokens of 2 heads or 4."""
    slopes = torch.tensor([0.1, 0.02, 0.05, 0.01], dtype=torch.float64, device=device)
    ids = torch.arange(n) * 7 // n

    def alibi(score, b, h, q, k):
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


def reference(query, key, value, case: Case):
    """(out, lse) of every score, differentiable; key heads may be fewer."""
    score_mod, mask_mod, is_causal = case
    shared = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
    device = query.device
    scores = query @ key.mT * query.shape[-1] ** -0.5
    b, h, q, k = (torch.arange(n, device=device) for n in scores.shape)
    at = b[:, None, None, None], h[:, None, None], q[:, None], k
    if score_mod is not None:
        scores = score_mod(scores, *at)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*at), -torch.inf)
    return softmax(masked(scores, is_causal), value)


def random(n: int, heads: int = 2, kv_heads: int | None = None, **sizes: int):
    """Query, key, value and an upstream gradient."""
    g, batch = fresh_generator(), sizes.get("batch", 1)
    of_keys = (kv_heads or heads, sizes.get("n_keys", n))
    return [
        torch.randn(batch, h, rows, sizes.get("width", 16), generator=g)
        for h, rows in ((heads, n), of_keys, of_keys, (heads, n))
    ]


def run(kernel, tensors, is_causal: bool, **plan):
    """(out, lse, gradients), of planned calls if there is anything to plan."""
    q, k, v, grad = tensors
    device = plan.pop("device", "cpu")
    common = {
        "is_causal": is_causal, "kernel": kernel, "devices": device,
        "enable_gqa": q.shape[1] != k.shape[1],
    }  # fmt: skip
    pins: Any = ({}, {})
    if plan:
        pins = [
            {"plan": qa.plan(
                q.shape[2], heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3],
                n_keys=k.shape[2], dtype=q.dtype, is_causal=is_causal, kernel=kernel,
                backward=backward, device=device, **plan,
            )}
            for backward in (False, True)
        ]  # fmt: skip
    out, lse, *grads = both_passes(Inputs(q, k, v, grad), pins, **common)
    return out, lse, tuple(grads)


def check(kernel, tensors, exact, is_causal: bool, **plan) -> None:
    """A call and its gradients are those of ``exact(query, key, value) -> (out, lse)``
    in float64."""
    out, lse, grads = run(kernel, tensors, is_causal, **plan)
    right = [t.double().requires_grad_() for t in tensors[:3]]
    expected, expected_lse = exact(*right)
    expected.backward(tensors[3].double())
    torch.testing.assert_close(out.double(), expected.detach(), atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(
        lse.double(), expected_lse.detach(), atol=1e-5, rtol=1e-5
    )
    for mine, theirs in zip(grads, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs.grad, atol=2e-5, rtol=1e-5)
