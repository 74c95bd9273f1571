"""Zeros that are added change nothing, and what is added to keys is masked."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.kernels.padding import bias_for_padding, pad_last, pad_rows


def test_what_is_long_enough_is_not_copied() -> None:
    tensor = torch.randn(1, 2, 5, 8)
    assert pad_last(tensor, 8) is tensor
    assert pad_rows(tensor, 5) is tensor
    assert pad_last(tensor, 3) is tensor


def test_zeros_behind() -> None:
    tensor = torch.randn(1, 2, 5, 6)
    wide, long = pad_last(tensor, 8), pad_rows(tensor, 7, 3.0)
    assert torch.equal(wide[..., :6], tensor)
    assert wide[..., 6:].eq(0).all()
    assert torch.equal(long[:, :, :5], tensor)
    assert long[:, :, 5:].eq(3).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [None, (1, 2, 5, 7), (1, 1, 1, 7), (1, 2, 5, 1)])
@pytest.mark.parametrize("least", [(5, 7), (16, 7), (5, 16), (16, 16)])
def test_a_padded_call_is_the_call(causal: bool, shape, least: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    """Computed with the padding and cut off again, rows come out as without."""
    n_queries, n_keys = (5, 5) if causal else (5, 7)
    query = torch.randn(1, 2, n_queries, 4, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, n_keys, 4, dtype=torch.float64)
    bias = None if shape is None else torch.randn(shape, dtype=torch.float64)[..., :n_keys]
    if causal:
        least = (max(least), max(least))
    mask = bias_for_padding(bias, query, n_keys, least, causal)

    def attended(q, k, v, mask):  # type: ignore[no-untyped-def]
        scores = q @ k.mT
        if mask is not None:
            scores = scores + mask
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf)
        return scores.softmax(-1) @ v

    padded = attended(
        pad_rows(query, least[0]), *(pad_rows(t, least[1]) for t in (key, value)), mask
    )
    torch.testing.assert_close(padded[:, :, :n_queries], attended(query, key, value, bias))
