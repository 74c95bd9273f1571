"""Attention of one query, on a CPU."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.kernels.one_query import attend_one_query


@pytest.mark.parametrize("key_heads", [1, 2, 8])
@pytest.mark.parametrize("has_bias", [False, True])
def test_grouped_heads_are_queries_of_one_head(key_heads: int, has_bias: bool) -> None:
    """Each query head attends over the keys of its group, also in views of larger
    memory."""
    torch.manual_seed(0)
    batch, heads, n_keys, dim = 2, 8, 37, 16
    memory = torch.randn(2, batch, key_heads, n_keys + 5, dim, dtype=torch.float64)
    key, value = memory[..., :n_keys, :]
    query = torch.randn(batch, heads, 1, dim, dtype=torch.float64)
    bias = None
    if has_bias:
        bias = torch.rand(batch, 1, 1, n_keys) < 0.7
    out = attend_one_query(query, key, value, bias=bias, scale=0.3)
    group = heads // key_heads
    scores = query @ key.repeat_interleave(group, dim=1).mT * 0.3
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf)
    expected = scores.softmax(dim=-1) @ value.repeat_interleave(group, dim=1)
    torch.testing.assert_close(out, expected)
