"""The GPU operators' arguments and shapes, on meta tensors: no GPU needed, nothing computed."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.kernels import get_kernel
from quorum_attention.kernels.bias import aligned_bias, dead_rows
from quorum_attention.kernels.layouts import in_layout_of, token_major, zero_unit_strides


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (40, 80), (20, 12)])
def test_meta_calls(name: str, masked: bool, head_dim: int, value_dim: int) -> None:
    if (name == "flash" and (masked or head_dim != value_dim)) or (
        name == "cudnn" and head_dim % 8
    ):
        pytest.skip("refused")
    kernel = get_kernel(name)
    key_heads = 2 if kernel.grouped else 4

    def slot(heads: int, rows: int, width: int) -> torch.Tensor:
        shape = (2, heads, rows + 9, width)
        return torch.empty(shape, dtype=torch.float16, device="meta")[:, :, 1 : rows + 1]

    q, k, v = slot(4, 50, head_dim), slot(key_heads, 70, head_dim), slot(key_heads, 70, value_dim)
    do, o = slot(4, 50, value_dim), slot(4, 50, value_dim)
    bias = torch.empty(1, 1, 50, 1, dtype=torch.float16, device="meta") if masked else None
    out, lse = kernel.rectangle_forward(q, k, v, False, 0.5, bias)
    assert out.shape == do.shape
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32
    grads = kernel.rectangle_backward(do, q, k, v, o, lse, False, 0.5, bias)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("columns", [1, 5, 16, 24])
@pytest.mark.parametrize("offset", [0, 3, 8])
def test_aligned_bias(columns: int, offset: int) -> None:
    base = torch.randn(2, 1, 6, 40).half()
    bias = base[:, :, :, offset : offset + columns]
    n_keys = 24 if columns == 1 else columns
    aligned = aligned_bias(bias, n_keys)
    assert torch.equal(aligned, bias.expand(2, 1, 6, n_keys))
    assert aligned.data_ptr() % 16 == 0
    assert aligned.stride(-1) == 1
    assert all(stride % 8 == 0 for stride in aligned.stride()[:-1])
    copied = aligned.data_ptr() != bias.data_ptr()
    assert copied == (columns == 1 or offset == 3)


def test_layouts() -> None:
    query = torch.randn(2, 5, 3, 4).transpose(1, 2)  # token-major (b, h, n, d)
    other = torch.randn(2, 3, 5, 6)
    copy = in_layout_of(other, query)
    assert torch.equal(copy, other)
    assert copy.stride() == torch.randn(2, 5, 3, 6).transpose(1, 2).stride()
    assert in_layout_of(copy, query) is copy
    assert in_layout_of(other, other) is other
    # What torch allocates for an output of that query.
    assert in_layout_of(query[..., :1], query).stride()[:3] == (15, 1, 3)
    assert token_major(other).stride() == (90, 6, 18, 1)
    unit = torch.randn(1, 3, 1, 4)
    assert zero_unit_strides(unit).stride() == (0, 4, 0, 1)
    assert torch.equal(zero_unit_strides(unit), unit)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 9, 9), (1, 1, 1, 9), (1, 3, 9, 1), (1, 1, 1, 1)])
def test_dead_rows(causal: bool, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    bias = torch.zeros(shape).masked_fill_(torch.rand(shape, generator=generator) < 0.7, -torch.inf)
    full = bias.expand(2, 3, 9, 9)
    if causal:
        full = full.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
    expected = (full == -torch.inf).all(-1)
    assert torch.equal(dead_rows(bias, 9, causal).expand(2, 3, 9), expected)
    assert not dead_rows(torch.full((1, 1, 9, 9), torch.nan), 9, causal).any()
