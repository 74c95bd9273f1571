"""Rows that a mask leaves no key, and masks as operators with vector loads take them."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.kernels.tensors import (
    BASE_TWO_LOWEST,
    aligned_bias,
    dead_rows,
    dead_rows_bytes,
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 3, 9, 9), (1, 1, 9, 9), (1, 1, 1, 9), (1, 3, 9, 1), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("lowest", [-torch.inf, -1000.0])
def test_rows_without_any_key(causal: bool, shape: tuple[int, ...], lowest: float) -> None:
    bias = torch.randn(shape)
    bias[torch.rand(shape) < 0.7] = lowest
    never = bias.expand(2, 3, 9, 9) <= lowest
    if causal:
        never = never | torch.ones(9, 9, dtype=torch.bool).triu(1)
    found = dead_rows(bias, 9, causal, lowest)
    assert torch.equal(found.expand(2, 3, 9), never.all(-1))


def test_nan_is_a_key() -> None:
    bias = torch.full((1, 1, 4, 4), -torch.inf)
    bias[..., 2] = torch.nan
    assert dead_rows(bias, 4, False).tolist() == [[[False] * 4]]
    assert dead_rows(bias, 4, True).tolist() == [[[True, True, False, False]]]


def test_lowest_numbers_of_wide_dtypes_are_below_what_base_two_tells() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.finfo(dtype).min <= BASE_TWO_LOWEST
    assert torch.finfo(torch.float16).min > BASE_TWO_LOWEST


def test_bytes_are_those_of_the_answer_at_least() -> None:
    assert dead_rows_bytes(2, 3, 100, 70, False) >= 2 * 3 * 100
    assert dead_rows_bytes(2, 3, 100, 70, True) > dead_rows_bytes(2, 3, 100, 70, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[..., :13],
        lambda base: base[..., 1:14],
        lambda base: base[:, :, ::2, :13],
        lambda base: base[..., :1],
        lambda base: base.mT[..., :13, :],
    ],
    ids=["cut", "shifted", "strided", "one column", "transposed"],
)
def test_aligned(dtype: torch.dtype, view) -> None:  # type: ignore[no-untyped-def]
    bias = view(torch.randn(2, 1, 16, 16).to(dtype))
    n_keys = max(13, bias.shape[-1])
    found = aligned_bias(bias, n_keys)
    assert torch.equal(found, bias.expand(*bias.shape[:-1], n_keys))
    assert found.stride(-1) == 1
    assert found.data_ptr() % 16 == 0
    assert all(s * found.element_size() % 16 == 0 for s in found.stride()[:-1])
    assert aligned_bias(found, n_keys) is found


@pytest.mark.parametrize("columns", [1, 5, 16, 24])
@pytest.mark.parametrize("offset", [0, 3, 8])
def test_copied_only_where_it_has_to_be(columns: int, offset: int) -> None:
    bias = torch.randn(2, 1, 6, 40).half()[:, :, :, offset : offset + columns]
    n_keys = 24 if columns == 1 else columns
    aligned = aligned_bias(bias, n_keys)
    assert torch.equal(aligned, bias.expand(2, 1, 6, n_keys))
    copied = aligned.data_ptr() != bias.data_ptr()
    assert copied == (columns == 1 or offset == 3)
