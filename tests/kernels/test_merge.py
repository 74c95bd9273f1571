"""The merge of statistics: any order, empty rows, extreme lse, sinks, every dtype."""

from __future__ import annotations

import itertools

import pytest
import torch

from quorum_attention.kernels import tensors
from quorum_attention.kernels.merge import add_, empty_, merge_, sinks_gradient
from quorum_attention.kernels.scaling import LOG2_LARGEST, divide_gradient_


def statistics(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return p @ values, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1.0, 300.0], ids=["usual", "hundreds"])
def test_any_order_gives_the_whole(dtype: torch.dtype, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 2, 9, 12, generator=generator, dtype=torch.float64) * size
    scores[:, :, 3] = -torch.inf
    scores[:, 0, 4, :8] = -torch.inf
    values = torch.randn(1, 2, 12, 5, generator=generator, dtype=torch.float64)
    expected_out, expected_lse = statistics(scores, values)
    parts = [
        statistics(s, v)
        for s, v in zip(scores.split(3, dim=-1), values.split(3, dim=-2), strict=True)
    ]
    for order in itertools.permutations(range(4)):
        out = torch.empty(1, 2, 9, 5, dtype=dtype)
        lse = torch.empty(1, 2, 9, dtype=dtype)
        empty_(out, lse)
        for i in order:
            merge_(out, lse, parts[i][0].to(dtype), parts[i][1].to(dtype))
        tolerance = 1e-6 * size if dtype == torch.float32 else 1e-13 * size
        torch.testing.assert_close(out.double(), expected_out, atol=tolerance, rtol=0)
        torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_into_16_bits_it_is_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    out, part = (torch.randn(1, 3, 50, 8, generator=generator).to(dtype) for _ in range(2))
    lse, lse_i = (torch.randn(1, 3, 50, generator=generator) for _ in range(2))
    wide, same = out.float(), lse.clone()
    merge_(wide, same, part, lse_i)
    merge_(out, lse, part, lse_i)
    assert torch.equal(out, wide.to(dtype))
    assert torch.equal(lse, same)


def test_empty_rows_stay_empty_and_weigh_nothing() -> None:
    out, lse = torch.empty(1, 1, 3, 2), torch.empty(1, 1, 3)
    empty_(out, lse)
    merge_(out, lse, torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3), -torch.inf))
    assert torch.equal(out, torch.zeros(1, 1, 3, 2))
    assert torch.equal(lse, torch.full((1, 1, 3), -torch.inf))
    some = torch.tensor([[[[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]]])
    some_lse = torch.tensor([[[700.0, -700.0, -torch.inf]]])
    merge_(out, lse, some, some_lse)
    assert torch.equal(out, some)
    assert torch.equal(lse, some_lse)
    merge_(out, lse, torch.zeros(1, 1, 3, 2), torch.full((1, 1, 3), -torch.inf))
    assert torch.equal(out, some)
    assert torch.equal(lse, some_lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block_bytes", [1, 1000, 10**7])
@pytest.mark.parametrize("shape", [(2, 3, 37, 5), (1, 1, 1, 1), (3, 1, 8, 4), (0, 2, 3, 4)])
def test_blocks_cover_every_row_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block_bytes: int, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    b, h, n, d = shape
    out, lse = torch.randn(b, h, n + 3, d)[:, :, 1 : n + 1], torch.randn(b, n, h).transpose(1, 2)
    out_i, lse_i = torch.randn(b, n, h, d).transpose(1, 2).to(dtype), torch.randn(b, h, n)
    w = torch.sigmoid(lse_i - lse).unsqueeze(-1)
    expected = out + w * (out_i.float() - out)
    expected_lse = torch.logaddexp(lse, lse_i)
    grad = torch.randn(shape)
    expected_grad = grad + 0.25 * out_i.float()
    monkeypatch.setattr(tensors, "BLOCK_BYTES", block_bytes)
    merge_(out, lse, out_i, lse_i)
    add_(grad, out_i, 0.25)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype_i", [torch.float16, None], ids=["16 bits", "alike"])
@pytest.mark.parametrize("order", [1, -1], ids=["large first", "small first"])
def test_large_values_of_hardly_any_weight_leave_no_rounding(dtype, dtype_i, order) -> None:
    """What an addend of a small weight costs is a rounding of its share, not of its size."""
    parts = [
        (torch.full((1, 1, 1, 4), value, dtype=dtype), torch.tensor([[[lse]]], dtype=dtype))
        for value, lse in ((30_000.0, 0.0), (2.0**-10, 18.0))
    ]
    out, lse = torch.empty(1, 1, 1, 4, dtype=dtype), torch.empty(1, 1, 1, dtype=dtype)
    empty_(out, lse)
    for out_i, lse_i in parts[::order]:
        merge_(out, lse, out_i.to(dtype_i or dtype), lse_i)
    weight = torch.tensor(-18.0, dtype=torch.float64).sigmoid()
    exact = weight * 30_000.0 + (1 - weight) * 2.0**-10
    assert ((out.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * exact).all()


def test_calls_without_rows_have_a_gradient_of_their_sinks() -> None:
    sinks = torch.randn(3)
    for shape in ((2, 3, 0, 4), (0, 3, 5, 4), (2, 3, 5, 0), (0, 3, 0, 0), (2, 0, 3, 0, 4)):
        out = torch.zeros(shape)
        found = sinks_gradient(out, out, torch.zeros(shape[:-1]), sinks)
        assert torch.equal(found, torch.zeros(3))


@pytest.mark.parametrize("broken", [None, torch.inf, torch.nan])
def test_gradients_are_divided_exactly_and_by_their_largest_finite_row(broken) -> None:
    grad = (
        torch.randn(2, 4, 300, 64) * torch.tensor([0.0, 1e-6, 1.0, 900.0])[:, None, None]
    ).half()
    value, unscale = torch.randn(2, 2, 70, 64).half(), torch.zeros(2, 2)
    norms = grad.float().norm(dim=-1).unflatten(1, (2, 2)).amax((2, 3))
    if broken is not None:
        grad[1, 3, 299, 63] = broken
        norms[1, 1] = grad[1, 2:].float().norm(dim=-1).nan_to_num(0.0, posinf=0.0).max()
    given = grad.clone()
    divide_gradient_(grad, value, unscale, 9)
    assert bool((unscale.log2() == unscale.log2().round()).all())
    divisors = unscale.repeat_interleave(2, 1)[..., None, None]
    assert torch.equal(grad.nan_to_num(), (given.float() / divisors).half().nan_to_num())
    bound = norms / unscale * 2 * value.float().norm(dim=-1).amax(-1) * 2.0**9
    assert bool(
        ((bound <= 2.0**LOG2_LARGEST * 1.001) & (bound > 2.0 ** (LOG2_LARGEST - 1.01))).all()
    )
