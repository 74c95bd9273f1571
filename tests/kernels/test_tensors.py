"""Views, layouts, padded forms, copies, blocks and masks of tensors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed.tensor  # looks at cuDNN's operators, which a test replaces
from helpers.attention import attention, gradients
from helpers.memory import usage

from quorum_attention.kernels import cudnn
from quorum_attention.kernels.call_shape import BiasShape, CallShape, Extent
from quorum_attention.kernels.cudnn import CudnnKernel
from quorum_attention.kernels.dead_rows import BASE_TWO_LOWEST, dead_rows
from quorum_attention.kernels.operator_call import Call, Saved


def _forward(query, key, value, bias, _lse, _p, causal, _debug, *, scale):  # type: ignore[no-untyped-def]
    bias = 0.0 if bias is None else bias
    found = attention(query, key, value, is_causal=causal, scale=scale, bias=bias)
    return (*found, *[torch.zeros(())] * 7)


def _backward(*given, scale):  # type: ignore[no-untyped-def]
    bias = 0.0 if given[8] is None else given[8]
    return gradients(*given[:6], is_causal=given[-1], scale=scale, bias=bias)


@pytest.fixture
def made_up_cudnn(monkeypatch: pytest.MonkeyPatch) -> CudnnKernel:
    """The kernel of cuDNN, its operators written out in torch."""
    prefix = "_scaled_dot_product_cudnn_attention"
    monkeypatch.setattr(torch.ops.aten, prefix, _forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, f"{prefix}_backward", _backward, raising=False)
    monkeypatch.setattr(cudnn, "_forward_template", lambda device: (3, torch.int64))
    return CudnnKernel()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [None, "of keys", "of rows"])
@pytest.mark.parametrize("sizes", [(5, 7), (5, 100), (100, 7)])
def test_a_padded_rectangle_has_no_nan_of_its_own(
    causal: bool, bias: str | None, sizes: tuple[int, int], made_up_cudnn: CudnnKernel
) -> None:
    """A key that no query gives any weight, because its scores are -inf, has gradients
    of 0; and rows of scores far below 0 have the weights that they have without the
    padding."""
    n, m = (sizes[0], sizes[0]) if causal else sizes
    query, grad_out = torch.randn(2, 1, 2, n, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, m, 8, dtype=torch.float64)
    query[..., 0] = query[..., 0].abs() + 0.1
    key[:, :, 3, 0] = -torch.inf
    mask = None
    if bias is not None:
        mask = (
            torch.randn(1, 2, n if bias == "of rows" else 1, m, dtype=torch.float64)
            - 2000.0
        )
    out, lse = made_up_cudnn.rectangle_forward(
        Call(query, key, value, causal, 0.5, mask)
    )
    wanted = _forward(query, key, value, mask, True, 0.0, causal, False, scale=0.5)
    for one, other in zip((out, lse), wanted, strict=False):
        torch.testing.assert_close(one, other)
    given = (grad_out, query, key, value, out, lse)
    grads = made_up_cudnn.rectangle_backward(
        Call(query, key, value, causal, 0.5, mask), Saved(grad_out, out, lse)
    )
    exact = _backward(*given, 0, 0, mask, causal, scale=0.5)
    assert bool(exact[1].isfinite().all() and exact[2].isfinite().all())
    for one, other in zip(grads, exact, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [None, "of keys", "of rows"])
@pytest.mark.parametrize(
    "sizes", [(3, 6), (4, 4), (1, 63), (63, 65), (70, 40), (100, 100)], ids=str
)
def test_copies_of_short_rows_are_counted(
    causal: bool, bias: str | None, sizes: tuple[int, int], made_up_cudnn: CudnnKernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Thousands of entries of three tokens took twice what was planned."""
    monkeypatch.setattr(cudnn, "_INTERNAL_BYTES", 0)
    n, m = (sizes[0], sizes[0]) if causal else sizes
    query, grad_out = torch.randn(2, 2000, 2, n, 16).half()
    key, value = torch.randn(2, 2000, 1, m, 16).half()
    mask = None
    if bias is not None:
        mask = torch.randn(2000, 1, n if bias == "of rows" else 1, m).half()

    def results(query, key, value):  # type: ignore[no-untyped-def]
        return (torch.empty_like(t) for t in (query, key, value))

    def forward(query, key, value, bias, _lse, _p, causal, _debug, *, scale):  # type: ignore[no-untyped-def]
        return torch.empty_like(query), torch.empty(query.shape[:3]), *[None] * 7

    prefix = "_scaled_dot_product_cudnn_attention"
    monkeypatch.setattr(torch.ops.aten, prefix, forward, raising=False)
    monkeypatch.setattr(
        torch.ops.aten,
        f"{prefix}_backward",
        lambda _, *given, scale: results(*given[:3]),
    )
    of_mask = None if mask is None else BiasShape(True, False, bias == "of rows")
    shape = CallShape("cuda", torch.float16, 2, 1, 16, 16, causal, bias=of_mask)
    extent = Extent(2000, 2, 1, max(n, m), n, m, direct=True)
    call = Call(query, key, value, causal, 0.5, mask)
    out, lse = torch.zeros_like(query), torch.zeros(query.shape[:3])
    used = usage(lambda: made_up_cudnn.rectangle_forward(call))
    assert used.peak <= made_up_cudnn.forward_workspace_bytes(shape, extent)
    used = usage(
        lambda: made_up_cudnn.rectangle_backward(call, Saved(grad_out, out, lse))
    )
    assert used.peak <= made_up_cudnn.backward_workspace_bytes(shape, extent)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_of_scores_of_minus_infinity_stays_one(
    causal: bool, made_up_cudnn: CudnnKernel
) -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    key[..., 0] = key[..., 0].abs() + 0.1
    query[:, :, 3, 0] = -torch.inf
    lse = made_up_cudnn.rectangle_forward(Call(query, key, value, causal, 0.5))[1]
    assert bool((lse[:, :, 3] == -torch.inf).all())
    assert bool(lse[:, :, [0, 1, 2, 4]].isfinite().all())


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_the_lowest_number_are_without_keys_where_kernels_cannot_tell(
    causal: bool,
) -> None:
    lowest = torch.finfo(torch.float32).min
    bias = torch.tensor(
        [[0.0, lowest, 0.0], [lowest, lowest, lowest], [lowest, -math.inf, 1.0]]
    )
    bias = bias[None, None]
    assert dead_rows(bias, 3, causal).tolist() == [[[False] * 3]]
    gone = dead_rows(bias, 3, causal, BASE_TWO_LOWEST)
    assert gone.tolist() == [[[False, True, False]]]
