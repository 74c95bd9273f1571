"""What the native kernel does, by hand, in float64 and with every score in memory."""

from __future__ import annotations

import torch


def reference(
    query, key, value, *, bias=None, is_causal=False, scale=None, window=(-1, -1), softcap=0.0,
    slopes=None, sinks=None, query_bits=None, key_bits=None,
):  # fmt: skip
    """(out, lse) with a gradient; tensors (b, h, n, d) of float64 on the CPU."""
    n, m = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * (query @ key.mT)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    apart = torch.arange(n)[:, None] - torch.arange(m)[None]
    if slopes is not None:
        scores = scores - slopes.double()[None, :, None, None] * apart.abs()
    if bias is not None:
        scores = scores + bias
    keep = torch.ones(n, m, dtype=torch.bool)
    if is_causal:
        keep &= apart >= 0
    left, right = window
    if left >= 0:
        keep &= apart <= left
    if right >= 0:
        keep &= apart >= -right
    if query_bits is not None:
        keep &= (query_bits[:, None] & key_bits[None]) == 0
    scores = scores.masked_fill(~keep, -torch.inf)
    if sinks is not None:
        more = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, more], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return p[..., :m] @ value, lse


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest value; equal infinities do not differ."""
    found, expected = found.detach().cpu().double(), expected.detach()
    assert not found.isnan().any()
    difference = torch.where(found == expected, 0.0, (found - expected).abs())
    size = expected[expected.isfinite()].abs()
    largest = float(size.max()) if size.numel() else 0.0
    return float(difference.max()) / max(largest, 1e-9)
