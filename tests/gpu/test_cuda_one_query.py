"""Attention of one query on a GPU."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.kernels import one_query

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def expected_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """The equations, in float64."""
    group = query.shape[1] // key.shape[1]
    key = key.cpu().double().repeat_interleave(group, dim=1)
    value = value.cpu().double().repeat_interleave(group, dim=1)
    scores = query.cpu().double() @ key.mT * query.shape[3] ** -0.5
    return scores.softmax(dim=-1) @ value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 20])
@pytest.mark.parametrize("n_keys", [1, 777, 40_000])
def test_one_query_over_a_part_of_a_cache(
    n_keys: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Keys and values are views of memory for more tokens, as a cache has them."""
    torch.manual_seed(0)
    memory = torch.randn(2, 2, 2, n_keys + 100, head_dim, device="cuda", dtype=dtype)
    key, value = memory[..., :n_keys, :]
    query = torch.randn(2, 8, 1, head_dim, device="cuda", dtype=dtype)
    out = one_query.attend_one_query(query, key, value)
    expected = expected_of(query, key, value)
    error = (out.cpu().double() - expected).abs().max().item()
    assert out.shape == query.shape
    assert error <= 1e-2 * expected.abs().max().item()


def test_flash_takes_calls_in_16_bits() -> None:
    """The host makes no plan for each number of keys."""
    query = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(1, 2, 50, 128, device="cuda", dtype=torch.bfloat16)
    assert one_query._is_for_flash(query, key, key)
    assert not one_query._is_for_flash(query.float(), key.float(), key.float())
