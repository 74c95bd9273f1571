"""Upstream gradients of a wider dtype than the inputs: numbers too large or small are not lost."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import Inputs, assert_close, exact, inputs
from helpers_memory import usage

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
N = 300
ROUTES = {
    "direct": {"levels": ()},
    "slots": {"levels": (7,), "over_inputs": False, "tile": 16, "n_cap": 2},
    "one slot": {"levels": (3,), "over_inputs": False, "tile": 16, "n_cap": 1},
    "over_inputs": {"levels": (7,), "over_inputs": True, "tile": 16},
}


def gradients(made: Inputs, route: str, result: torch.dtype, kernel: str = "auto"):  # type: ignore[no-untyped-def]
    out, lse = qa.attention_with_lse(*made.three, is_causal=True, enable_gqa=True, kernel=kernel)
    q, k = made.query, made.key
    plan = qa.plan(
        N, heads=q.shape[-3], kv_heads=k.shape[-3], head_dim=8, dtype=q.dtype, is_causal=True,
        batch=q.shape[:-3].numel(), device="cpu", backward=True, kernel=kernel, **ROUTES[route],
    )  # fmt: skip
    grads = tuple(torch.full(t.shape, torch.nan, dtype=result) for t in made.three)
    return qa.attention_backward(
        made.grad_out, *made.three, out, lse, is_causal=True, enable_gqa=True, plan=plan,
        grads=grads, kernel=kernel,
    )  # fmt: skip


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_gradients_that_fp16_cannot_hold(size, dtype, route: str, kernel: str) -> None:
    if kernel == "dense" and route == "over_inputs":
        pytest.skip("it takes tasks one by one")
    made = inputs(N, heads=4, kv_heads=2, batch=(2,), dtype=torch.float16)
    # Gradients of each head have another size, so each head is divided by another power of two.
    sizes = torch.tensor([1.0, 1.0, 1e-6, 1e-6], dtype=torch.float64)[:, None, None]
    made.grad_out = (made.grad_out.double() * sizes * size).to(dtype)
    reference = exact(made, is_causal=True, gradients=True)
    for actual, wanted in zip(
        gradients(made, route, torch.float32, kernel), reference.grads, strict=True
    ):
        half = actual.shape[1] // 2
        for heads in (slice(0, half), slice(half, None)):
            largest = wanted[:, heads].abs().max()
            assert_close(actual[:, heads].double() / largest, wanted[:, heads] / largest, 5e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e5])
@pytest.mark.parametrize("depth", [0, 1])
def test_through_autograd(dtype: torch.dtype, size: float, depth: int) -> None:
    made = inputs(N, dtype=dtype)
    made.query *= 4
    three = [t.clone().requires_grad_() for t in made.three]
    out = qa.attention(*three, is_causal=True, out_dtype=torch.float32, depth=depth)
    assert out.dtype == torch.float32
    made.grad_out = made.grad_out.float() * size
    reference = exact(made, is_causal=True, gradients=True)
    for actual, wanted in zip(torch.autograd.grad(out, three, made.grad_out), reference.grads,
                              strict=True):  # fmt: skip
        assert actual.dtype == dtype
        largest = float(wanted.abs().max())
        share = 1e-2 if dtype == torch.float16 else 6e-2
        fits = wanted.abs() + share * largest < torch.finfo(dtype).max
        assert bool(actual[fits].isfinite().all())
        off = (actual.double() - wanted)[fits].abs().max()
        assert off <= share * largest + torch.finfo(dtype).smallest_normal / 512


@pytest.mark.parametrize("route", ["direct", "slots"])
@pytest.mark.parametrize("kernel", ["cpu", "dense", "cpu with dropout", "a mask"])
def test_small_rows_beside_large_ones_keep_their_digits(kernel: str, route: str) -> None:
    """Row 0 sees key 0 alone, so the gradients of all other keys are of small numbers only."""
    n = 40
    made = inputs(n, head_dim=8, dtype=torch.float16)
    made.grad_out = made.grad_out.float() * 3e-7
    made.grad_out[..., 0, :] = 1.0
    call = {"is_causal": True, "kernel": kernel.split()[0], "devices": "cpu"}
    if kernel == "a mask":
        call = {"devices": "cpu", "attn_mask": qa.Mask(causal=True, window=(n, 0), softcap=1e4)}
    if "dropout" in kernel:
        call |= {"dropout_p": 1e-6, "dropout_seed": 1}
    depth = 0 if route == "direct" else 1
    out, lse = qa.attention_with_lse(*made.three, out_dtype=torch.float32, **call)
    grads = tuple(torch.empty_like(t, dtype=torch.float32) for t in made.three)
    found = qa.attention_backward(
        made.grad_out, *made.three, out, lse, depth=depth, grads=grads, **call
    )
    wanted = exact(made, is_causal=True, gradients=True).grads[2][..., 1:, :]
    off = (found[2][..., 1:, :].double() - wanted).abs().max()
    assert off <= 2e-3 * wanted.abs().max()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_copy_is_counted(depth: int) -> None:
    made = inputs(3000, heads=2, head_dim=32, dtype=torch.float16)
    out, lse = qa.attention_with_lse(*made.three)
    report = qa.Report()
    grad_out = made.grad_out.float() * 1e6
    found = usage(
        lambda: qa.attention_backward(grad_out, *made.three, out, lse, depth=depth, report=report)
    )
    assert found.peak <= report.backward.planned_peak_bytes
