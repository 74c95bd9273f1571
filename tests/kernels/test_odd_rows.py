"""Rows with scores that are not finite come out as in exact arithmetic; others are not touched."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.kernels import tensors
from quorum_attention.kernels.cpu import mend_odd_rows_
from quorum_attention.kernels.protocol import Call

N = 12


def exact(query, key, value, causal, bias):  # type: ignore[no-untyped-def]
    scores = query @ key.mT
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(N, N).triu(1) > 0, -torch.inf)
    lse = scores.logsumexp(-1)
    largest = scores.amax(-1)
    # A score of +inf has an infinite sum, and no weights.
    lse = torch.where(largest == torch.inf, largest, lse)
    lse = torch.where(scores.isnan().any(-1), torch.nan, lse)
    out = (scores - lse.unsqueeze(-1)).exp() @ value
    out = torch.where(lse.isfinite().unsqueeze(-1), out, torch.nan)
    return torch.where((lse == -torch.inf).unsqueeze(-1), 0.0, out), lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["nan in keys", "nan in queries", "inf", "no keys", "all at once"])
@pytest.mark.parametrize("block_bytes", [None, 64])
def test_mended(causal: bool, kind: str, block_bytes: int | None, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    if block_bytes is not None:
        monkeypatch.setattr(tensors, "BLOCK_BYTES", block_bytes)
    query, key, value = torch.randn(3, 1, 2, N, 4, dtype=torch.float64)
    bias = torch.zeros(1, 2, N, N, dtype=torch.float64)
    if kind in ("nan in keys", "all at once"):
        key[0, 0, 5] = torch.nan
    if kind in ("nan in queries", "all at once"):
        query[0, 1, 3] = torch.nan
    if kind in ("inf", "all at once"):
        bias[0, 1, 7, 2] = torch.inf
    if kind in ("no keys", "all at once"):
        bias[0, 1, 9] = -torch.inf
    out, lse = exact(query, key, value, causal, bias)
    odd = ~lse.isfinite()
    assert odd.any()
    assert not odd.all()
    # As an operator might have it: nothing of those rows can be trusted.
    found_out, found_lse = out.clone(), lse.clone()
    found_out[odd] = 77.0
    found_lse[odd & (lse != -torch.inf)] = 0.0
    found_lse[odd & (lse == torch.inf)] = torch.inf
    found_lse[lse == -torch.inf] = 0.0
    mend_odd_rows_(found_out, found_lse, Call(query, key, value, causal, 1.0, bias))
    torch.testing.assert_close(found_out, out, equal_nan=True)
    torch.testing.assert_close(found_lse, lse, equal_nan=True)
