"""The merge of statistics: any order, empty rows, extreme lse, sinks, every dtype."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from helpers.attention import softmax

from quorum_attention.kernels import scaling, tensors
from quorum_attention.kernels.merge import add_, empty_, mend_, merge_
from quorum_attention.kernels.scaling import (
    LOG2_LARGEST,
    divide_gradient_,
    largest_norms,
)
from quorum_attention.kernels.sinks import sinks_gradient
from quorum_attention.kernels.triton_launch import (
    launch_add,
    launch_mend,
    launch_merge,
    triton_available,
)

# Triton's kernels run in its interpreter where there is no GPU.
Statistics = tuple[torch.Tensor, torch.Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MERGES = {"torch": (merge_, "cpu"), "triton": (launch_merge, DEVICE)}
MERGES = {
    name: of for name, of in MERGES.items() if name == "torch" or triton_available()
}
by_each = pytest.mark.parametrize("by", MERGES)
SHAPES = [(2, 3, 37, 40), (1, 1, 1, 1), (1, 2, 130, 64), (1, 1, 5, 257), (1, 0, 4, 8)]


def merged(by: str, states: Sequence[Statistics], dtype: torch.dtype) -> Statistics:
    """The states, one after the other, into an empty one."""
    merge, device = MERGES[by]
    states = [tuple(t.to(device) for t in state) for state in states]
    out = torch.empty(states[0][0].shape, dtype=dtype, device=device)
    lse = torch.empty(
        out.shape[:3], dtype=torch.promote_types(dtype, torch.float32), device=device
    )
    empty_(out, lse)
    for out_i, lse_i in states:
        merge(out, lse, out_i, lse_i.to(lse.dtype))
    return out.cpu(), lse.cpu()


@by_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1.0, 300.0], ids=["usual", "hundreds"])
def test_any_order_gives_the_whole(by: str, dtype: torch.dtype, size: float) -> None:
    if by == "triton" and dtype == torch.float64:
        pytest.skip("it has no float64")
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 2, 9, 12, generator=generator, dtype=torch.float64) * size
    scores[:, :, 3] = -torch.inf
    scores[:, 0, 4, :8] = -torch.inf
    values = torch.randn(1, 2, 12, 5, generator=generator, dtype=torch.float64)
    expected = softmax(scores, values)
    parts = map(softmax, scores.split(4, dim=-1), values.split(4, dim=-2))
    parts = [(out.to(dtype), lse) for out, lse in parts]
    tolerance = (1e-6 if dtype == torch.float32 else 1e-13) * size
    for order in itertools.permutations(parts):
        for found, wanted in zip(merged(by, order, dtype), expected, strict=True):
            torch.testing.assert_close(
                found.double(), wanted, atol=tolerance, rtol=1e-6
            )


@by_each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_once_rounded_once_and_nothing_beside_them(
    by: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Of strided states and parts, some without keys; into fp32, and into 16 bits."""
    merge, device = MERGES[by]
    b, h, n, d = shape
    base = torch.randn(b, h, n + 7, d, device=device)
    out, lse = (
        base[:, :, 3 : 3 + n],
        (torch.randn(b, h, n + 2) * 100).to(device)[:, :, 1 : 1 + n],
    )
    part = torch.randn(b, n, h, d).to(device, dtype).transpose(1, 2)
    of_part = (torch.randn(b, n, h, device=device) * 100).transpose(1, 2)
    for t, own, step in ((out, lse, 3), (part, of_part, 2)):
        t[:, :, ::step] = 0
        own[..., ::step] = -torch.inf
    before, expected, its_lse, w = (
        base.clone(),
        out.double(),
        lse.clone(),
        of_part.double() - lse,
    )
    w = w.masked_fill(of_part == -torch.inf, -torch.inf).sigmoid().unsqueeze(-1)
    expected += w * (part.double() - expected)
    own = (
        torch.float16 if by == "triton" else dtype
    )  # its interpreter cuts bfloat16 off
    narrow, wide, twice = out.to(own), out.to(own).float(), lse.clone()
    merge(wide, twice.clone(), part, of_part)
    merge(narrow, twice, part, of_part)
    assert torch.equal(narrow, wide.to(own))
    merge(out, lse, part, of_part)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(
        lse, torch.logaddexp(its_lse, of_part), atol=1e-4, rtol=1e-6
    )
    assert torch.equal(twice, lse)
    out.copy_(before[:, :, 3 : 3 + n])
    assert torch.equal(base, before)


@pytest.mark.parametrize("block_bytes", [1, 1000, 10**7])
def test_blocks_cover_every_row_once(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(tensors, "BLOCK_BYTES", block_bytes)
    for shape in (*SHAPES, (3, 1, 8, 4), (0, 2, 3, 4)):
        test_every_row_once_rounded_once_and_nothing_beside_them(
            "torch", torch.float16, shape
        )
        test_additions_and_what_is_not_finite_among_them("torch", shape)


@by_each
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_additions_and_what_is_not_finite_among_them(
    by: str, shape: tuple[int, ...]
) -> None:
    add, device = launch_add if by == "triton" else add_, MERGES[by][1]
    b, h, n, d = shape
    part = torch.randn(b, n, h, d).to(device, torch.float16).transpose(1, 2)
    target = torch.randn(b, h, n + 5, d, device=device)[:, :, 2 : 2 + n]
    factor = 2.0 ** torch.randint(-9, 9, (1, h), device=device).float()
    wanted = target.double() + 0.25 * factor[:, :, None, None].double() * part.double()
    flags = torch.zeros(3, h, dtype=torch.int32, device=device)
    add(target, part, 0.25, factor, flags[1:2])
    torch.testing.assert_close(target.double(), wanted, atol=1e-5, rtol=1e-5)
    assert not flags.any()
    for broken in (torch.inf, -torch.inf, torch.nan) if part.numel() else ():
        part[-1, -1, -1, -1] = broken
        add(target, part, 0.25, None, flags.zero_()[1:2])
        # Of the head at fault alone, and nothing beside the flags.
        assert flags.nonzero().tolist() == [[1, h - 1]]


@by_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype_i", [torch.float16, None], ids=["16 bits", "alike"])
def test_large_values_of_hardly_any_weight_leave_no_rounding(
    by, dtype, dtype_i
) -> None:
    """What an addend of a small weight costs is a rounding of its share, not of its
    size."""
    if by == "triton" and dtype == torch.float64:
        pytest.skip("it has no float64")
    parts = [
        (
            torch.full((1, 1, 1, 4), value, dtype=dtype_i or dtype),
            torch.tensor([[[lse]]]),
        )
        for value, lse in ((30_000.0, 0.0), (2.0**-10, 18.0))
    ]
    weight = torch.tensor(-18.0, dtype=torch.float64).sigmoid()
    exact = weight * 30_000.0 + (1 - weight) * 2.0**-10
    for order in (parts, parts[::-1]):
        out, _ = merged(by, order, dtype)
        assert (
            (out.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * exact
        ).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_more_rows_than_a_grid_has_programs_in_a_dimension() -> None:
    test_every_row_once_rounded_once_and_nothing_beside_them(
        "triton", torch.float16, (1, 1, 70_000 * 64, 64)
    )


def test_calls_without_rows_have_a_gradient_of_their_sinks() -> None:
    sinks = torch.randn(3)
    for shape in (
        (2, 3, 0, 4),
        (0, 3, 5, 4),
        (2, 3, 5, 0),
        (0, 3, 0, 0),
        (2, 0, 3, 0, 4),
    ):
        out = torch.zeros(shape)
        found = sinks_gradient(out, out, torch.zeros(shape[:-1]), sinks)
        assert torch.equal(found, torch.zeros(3))


@pytest.fixture(params=MERGES)
def scaling_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Scaling by torch's operators, and by Triton's kernels; where they run."""
    if request.param == "triton":
        monkeypatch.setattr(scaling, "triton_takes", lambda *tensors: True)
    return MERGES[request.param][1]


@pytest.mark.parametrize("broken", [None, torch.inf, torch.nan])
def test_gradients_are_divided_exactly_and_by_their_largest_finite_row(
    broken: float | None, scaling_device: str
) -> None:
    sizes = torch.tensor([0.0, 1e-6, 1.0, 900.0])[:, None, None]
    # Rows are not dense in memory.
    grad = (torch.randn(2, 4, 300, 70) * sizes).half().to(scaling_device)[..., 3:67]
    value = torch.randn(2, 2, 70, 64).half().to(scaling_device)
    unscale = torch.zeros(2, 3, device=scaling_device)[:, 1:]
    norms = grad.float().norm(dim=-1).unflatten(1, (2, 2)).amax((2, 3))
    if broken is not None:
        grad[1, 3, 299, 63] = broken
        norms[1, 1] = grad[1, 2:].float().norm(dim=-1).nan_to_num(0.0, posinf=0.0).max()
    given = grad.clone()
    divide_gradient_(grad, largest_norms(value, 2), unscale, 9)
    assert bool((unscale.log2() == unscale.log2().round()).all())
    divisors = unscale.repeat_interleave(2, 1)[..., None, None]
    assert torch.equal(
        grad.nan_to_num(), (given.float() / divisors).half().nan_to_num()
    )
    bound = norms / unscale * 2 * value.float().norm(dim=-1).amax(-1) * 2.0**9
    assert bool(
        (
            (bound <= 2.0**LOG2_LARGEST * 1.001)
            & (bound > 2.0 ** (LOG2_LARGEST - 1.01))
        ).all()
    )


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-18, 1e15, 1e38])
def test_a_divisor_is_a_power_of_two_that_fp32_holds(
    size: float, scaling_device: str
) -> None:
    """Also of kernels whose own dtype has a wider range than fp16."""
    grad = torch.full((1, 2, 5, 8), size, device=scaling_device)
    given, unscale = grad.clone(), torch.zeros(1, 2, device=scaling_device)
    divide_gradient_(grad, largest_norms(given, 2), unscale, 9)
    assert bool(((unscale >= 2.0**-60) & (unscale <= 2.0**60)).all())
    assert torch.equal(grad * unscale[..., None, None], given)


def test_a_gradient_without_rows_has_a_divisor_of_1(scaling_device: str) -> None:
    grad = torch.empty((2, 4, 0, 8), dtype=torch.float16, device=scaling_device)
    unscale = torch.zeros(2, 2, device=scaling_device)
    divide_gradient_(grad, largest_norms(grad, 2), unscale, 3)
    assert bool((unscale == 1).all())


@pytest.mark.skipif("triton" not in MERGES, reason="no Triton")
def test_triton_divides_by_the_powers_of_two_of_torchs_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their sums of squares may differ in the last bit, so norms are not at a power of
    two here."""
    generator = torch.Generator().manual_seed(0)
    for width in (1, 8, 80, 257):
        shape = (2, 6, 37, width)
        grad = torch.randn(shape, generator=generator)
        sizes = 2.0 ** torch.randint(-24, 12, (2, 6, 1, 1), generator=generator)
        grad = (grad * sizes).half().to(DEVICE)
        value = torch.randn(2, 3, 5, width, generator=generator)
        value = value.half().to(DEVICE)
        results = []
        for takes in (False, True):
            monkeypatch.setattr(
                scaling, "triton_takes", lambda *tensors, takes=takes: takes
            )
            divided, unscale = grad.clone(), torch.zeros(2, 3, device=DEVICE)
            divide_gradient_(divided, largest_norms(value, 3), unscale, 5)
            results.append((divided, unscale))
        for by_torch, by_triton in zip(*results, strict=True):
            assert torch.equal(by_torch, by_triton)


@by_each
def test_rows_whose_output_is_nan_are_not_taken_for_rows_without_keys(by: str) -> None:
    """Rows without keys, with an infinite output, or with a finite log-sum-exp, stay as
    they are, and so does all beside the rows."""
    mend, device = launch_mend if by == "triton" else mend_, MERGES[by][1]
    rows = 5000
    out = torch.randn(2, rows, 3, 8, device=device).half().transpose(1, 2)
    base = torch.randn(2, 3, rows + 4, device=device)
    lse = base[:, :, 2:-2]
    empty, is_nan = torch.rand(2, 2, 3, rows, device=device) < 0.1
    lse[empty] = -torch.inf
    out[is_nan] = torch.nan
    out[1, 2, :, 0] = torch.inf
    is_nan[1, 2] = False
    wanted = base.clone()
    wanted[:, :, 2:-2][empty & is_nan] = torch.nan
    mend(out, lse)
    torch.testing.assert_close(base, wanted, rtol=0, atol=0, equal_nan=True)
