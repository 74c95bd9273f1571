"""The GPU operators' arguments and shapes, on meta tensors: no GPU needed, nothing computed."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.kernels import get_kernel
from quorum_attention.kernels.operators import operator_arguments, operator_reason


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


def test_arguments_are_torchs_own() -> None:
    found = operator_arguments("scaled_dot_product_attention")
    assert found is not None
    assert found[:3] == ("query", "key", "value")
    assert operator_arguments("no_such_operator") is None


def test_what_torch_lacks_is_named() -> None:
    assert operator_reason("matmul", "add") is None
    assert "has no operator no_such_operator" in str(operator_reason("matmul", "no_such_operator"))
