"""The kernel of few pairs: exact beside float64, its limits, its bytes, and the calls
that get it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.entries import count_operators, masked_call
from helpers.few_pairs import DTYPES, drawn_call, largest_excess, results_of
from helpers.memory import usage

import quorum_attention as qa
from quorum_attention.kernels import select
from quorum_attention.kernels.call_shape import BiasShape, CallShape, Extent
from quorum_attention.kernels.operator_call import Call, Saved, whole_task
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.task_tensors import Gradients
from quorum_attention.kernels.unfused import MOST_PAIRS, UnfusedKernel

_LEARNED = BiasShape(False, True, True, False, needs_grad=True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("block", range(3))
def test_drawn_calls_are_as_exact_as_their_roundings(block: int) -> None:
    for number in range(30 * block, 30 * block + 30):
        drawn = drawn_call(number)
        excess = largest_excess(drawn, results_of(drawn, kernel="unfused"))
        assert excess < 1.0, f"drawn call {number}: {excess:.3g} of what is allowed"


def test_the_allowance_finds_an_error_of_a_few_digits() -> None:
    """Else the drawn calls would show nothing: each result is moved by 1e-3 of its
    largest element, in fp32."""
    drawn = drawn_call(28)
    assert drawn.tensors[0].dtype == torch.float32
    assert drawn.bias is not None
    results = results_of(drawn, kernel="unfused")
    for place in range(len(results)):
        changed = list(results)
        finite = results[place].nan_to_num(neginf=0.0)
        changed[place] = results[place] + 1e-3 * finite.abs().max()
        assert largest_excess(drawn, changed) > 1.0


@pytest.mark.parametrize("number", [*range(24), 3129])
def test_masks_of_tokens(number: int) -> None:
    """As a bias, packed or by parts, beside learned biases and sinks. (In the last one
    the kernel refused the parts of a mask, and its triangles went to another.)"""
    masked_call(number, kernel="unfused", plain=number % 2 == 0, compiles=False)


@pytest.mark.parametrize("number", range(12))
def test_calls_that_are_cut_into_tasks(number: int) -> None:
    """Their results are merged, and a backward has the log-sum-exp of whole rows."""
    drawn = drawn_call(number)
    drawn.tensors = [tensor.float() for tensor in drawn.tensors]
    drawn.grad_out = drawn.grad_out.float()
    drawn.bias = None if drawn.bias is None else drawn.bias.float()
    cut = results_of(drawn, kernel="unfused", depth=1)
    for part, exact in zip(cut, results_of(drawn, kernel="cpu"), strict=True):
        torch.testing.assert_close(part, exact, atol=1e-4, rtol=1e-4)


def test_a_budget_cuts_entries() -> None:
    shape = (40_000, 2, 8, 16)
    query, key, value = (torch.randn(shape) for _ in range(3))
    report = qa.Report()
    out = qa.attention(
        query, key, value, kernel="unfused", budget="16MiB", report=report,
        out=torch.empty(shape),
    )  # fmt: skip
    assert report.forward is not None
    assert report.forward.planned_peak_bytes <= 16 << 20
    assert report.forward.units > 1
    torch.testing.assert_close(out, qa.attention(query, key, value, kernel="cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.25, -0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias_sizes", [None, (1, 4, 8, 1), (1, 1, 8, 8)])
def test_all_bytes_are_counted(
    dtype: torch.dtype, scale: float, causal: bool,
    bias_sizes: tuple[int, int, int, int] | None,
) -> None:  # fmt: skip
    """Those of a whole call and its results, rounded or not, for rows that have to be
    copied too."""
    kernel = UnfusedKernel()
    entries = 500
    by_token = torch.randn(entries, 8, 4, 16).to(dtype)
    query = by_token.transpose(1, 2)
    key, value = torch.randn(2, entries, 2, 8, 16).to(dtype)
    bias, bias_shape = None, None
    if bias_sizes is not None:
        bias = torch.zeros(bias_sizes, dtype=dtype)
        bias_shape = BiasShape(*(size > 1 for size in bias_sizes))
    shape = CallShape(
        "cpu", dtype, 4, 2, 16, 16, causal, True, bias_shape, scale > 0
    )  # fmt: skip
    extent = Extent(entries, 4, 2, 8, 8, 8, direct=True)
    for stored in (None, shape.state_dtype):
        call = Call(query, key, value, causal, scale, bias, stored=stored)
        used = usage(lambda call=call: kernel.whole_forward(call))
        assert used.peak <= kernel.forward_workspace_bytes(shape, extent)
        out, lse = kernel.whole_forward(call)
        saved = Saved(torch.randn_like(query), out.to(dtype), lse)
        used = usage(lambda call=call, saved=saved: kernel.whole_backward(call, saved))
        assert used.peak <= kernel.backward_workspace_bytes(shape, extent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_bytes_of_a_task_are_counted(dtype: torch.dtype) -> None:
    """Upstream gradients may have any strides: copies of them were not counted, which
    is much beside two keys."""
    kernel = UnfusedKernel()
    query = torch.randn(50, 8, 60, 4).to(dtype)
    key, value = torch.randn(50, 4, 2, 4).to(dtype), torch.randn(50, 4, 2, 64).to(dtype)
    call = Call(query, key, value, False, 0.25)
    out, lse = kernel.whole_forward(call)
    grad_out = torch.randn(50, 8, 1, 64).to(dtype).expand(out.shape)
    out = out.mT.contiguous().mT
    shape = CallShape("cpu", dtype, 8, 4, 4, 64, needs_grad=True)
    sums = [torch.zeros_like(t, dtype=shape.state_dtype) for t in call.inputs]
    task = whole_task(call)
    grads = Gradients(grad_out, out, lse, sums[0], sums[1], sums[2])
    used = usage(lambda: kernel.backward(task, grads))
    extent = Extent(50, 8, 4, 60, 60, 2)
    assert used.peak <= kernel.backward_workspace_bytes(shape, extent)


def test_operators_do_not_grow_with_entries() -> None:
    """The kernel ``dense`` took 140 ms for 32,768 entries: it has 128 of them at a
    time."""
    counts = []
    for entries in (8, 4096):
        tensors = [torch.randn(entries, heads, 8, 16) for heads in (8, 2, 2, 8)]
        call = Call(*tensors[:3], scale=0.25, bias=torch.randn(1, 8, 8, 1))
        out, lse = UnfusedKernel().whole_forward(call)
        saved = Saved(tensors[3], out, lse)

        def both_passes(call: Call = call, saved: Saved = saved) -> None:
            UnfusedKernel().whole_forward(call)
            UnfusedKernel().whole_backward_with_bias(call, saved)

        counts.append(count_operators(both_passes))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_of_the_lowest_numbers(dtype: torch.dtype) -> None:
    """It is without keys, as by the kernels that larger calls get; float64 has lower
    numbers, whose differences count."""
    query, key, value = torch.randn(3, 1, 1, 3, 4, dtype=dtype)
    bias = torch.zeros(3, 3, dtype=dtype)
    bias[1] = torch.finfo(torch.float32).min
    call = Call(query, key, value, False, 0.5, bias)
    out, lse = UnfusedKernel().whole_forward(call)
    if dtype == torch.float32:
        assert not bool(out[0, 0, 1].any())
        assert lse[0, 0, 1].item() == -torch.inf
    else:
        torch.testing.assert_close(out[0, 0, 1], value[0, 0].mean(0))


def _shape(n_queries: int, n_keys: int, **fields: Any) -> CallShape:
    return CallShape(
        "cuda", torch.float32, 8, 2, 16, 16, needs_grad=True, batch_shape=(1024,),
        n_queries=n_queries, n_keys=n_keys, **fields,
    )  # fmt: skip


def test_it_refuses_many_pairs() -> None:
    """Its scores are in memory, and fused kernels fill their tiles."""
    kernel = get_kernel("unfused")
    assert kernel.refusal(_shape(64, 64)) is None
    assert kernel.refusal(_shape(1, MOST_PAIRS)) is None
    assert "in memory" in str(kernel.refusal(_shape(64, 65)))
    # The parts of a mask, of any length: the call that they are parts of was asked about.
    assert kernel.refusal(_shape(0, 0)) is None
    query = torch.randn(1, 1, 65, 16)
    with pytest.raises(NotImplementedError, match="4,096 pairs"):
        qa.attention(query, query, query, kernel="unfused")


@pytest.mark.parametrize(
    ("shape", "is_unfused"),
    [
        (_shape(8, 8), True),
        (_shape(16, 16), True),
        (_shape(16, 17), False),
        (replace(_shape(8, 8), batch_shape=(1023,)), False),
        (replace(_shape(8, 8), needs_grad=False), False),
        (replace(_shape(8, 8), needs_grad=False, batch_shape=(8191,)), False),
        (replace(_shape(8, 8), needs_grad=False, batch_shape=(8192,)), True),
        (replace(_shape(8, 8), dtype=torch.float64), True),
        (replace(_shape(8, 8), dtype=torch.bfloat16), False),
        (replace(_shape(8, 8), device_type="cpu"), False),
        (_shape(0, 0), False),
        (replace(_shape(0, 0), dtype=torch.float64), False),
        (replace(_shape(8, 8), bias=BiasShape(False, True, True)), True),
        (replace(_shape(8, 8), batch_shape=(1,), bias=_LEARNED), True),
        (_shape(32, 32, bias=_LEARNED), True),
        (_shape(32, 33, bias=_LEARNED), False),
        (_shape(32, 32, bias=replace(_LEARNED, needs_grad=False)), False),
        (replace(_shape(8, 8, bias=_LEARNED), dtype=torch.float16), False),
    ],
)
def test_calls_that_get_it(shape: CallShape, is_unfused: bool) -> None:
    """Few pairs in many heads, and few pairs whose bias gets a gradient."""
    device = torch.device(shape.device_type)
    kernel = select.select_kernel("auto", shape, device, tried=False)
    assert (kernel.name == "unfused") == is_unfused


def test_calls_that_allow_tf32_do_not_get_it() -> None:
    """Its products are torch's, which would be rounded to ten bits."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        names = list(select._by_preference(_shape(8, 8), torch.device("cuda")))
    finally:
        torch.set_float32_matmul_precision(precision)
    assert names[0] != "unfused"
    assert next(iter(select._by_preference(_shape(8, 8), torch.device("cuda")))) == (
        "unfused"
    )


def test_a_learned_bias_comes_with_the_other_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the one backward, and not by another walk over all pairs; as a tensor or in a
    ``Mask``."""
    calls: list[str] = []
    backward = UnfusedKernel.whole_backward_with_bias

    def counted(self: UnfusedKernel, call: Call, saved: Saved) -> Any:
        calls.append("backward")
        return backward(self, call, saved)

    monkeypatch.setattr(UnfusedKernel, "whole_backward_with_bias", counted)
    kernel = get_kernel("unfused")
    monkeypatch.setattr(select, "_by_preference", lambda *_: {"unfused": kernel})
    query, key, value = torch.randn(3, 50, 2, 8, 16)
    bias = torch.randn(1, 2, 8, 8, requires_grad=True)
    grads = []
    for mask in (bias, qa.Mask(bias=bias)):
        out = qa.attention(query, key, value, mask)
        grads.append(torch.autograd.grad(out.sum(), bias)[0])
    assert calls == ["backward"] * 2
    exact = qa.attention(query, key, value, bias, kernel="cpu")
    (expected,) = torch.autograd.grad(exact.sum(), bias)
    for grad in grads:
        torch.testing.assert_close(grad, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_gradient_is_rounded_once_it_is_scaled(scale: float) -> None:
    """With a scale of 0 the gradient of the query was that with a scale of 1, rounded
    to fp16, times 0: NaN where fp16 holds no such number."""
    torch.manual_seed(0)
    query, key, value, grad_out = (1e3 * torch.randn(4, 2, 2, 8, 16)).half()
    query = query.requires_grad_()
    out = qa.attention(query, key, value, scale=scale, kernel="unfused")
    (grad_query,) = torch.autograd.grad(out, query, grad_out)
    exact = qa.attention(query, key, value, scale=scale, kernel="dense")
    (expected,) = torch.autograd.grad(exact, query, grad_out)
    assert not bool(grad_query.isnan().any())
    torch.testing.assert_close(grad_query, expected, atol=1e-2, rtol=1e-2)


def test_triangles_of_a_window_have_wide_gradients() -> None:
    """An fp32 gradient upstream is divided so that fp16 just holds it. The gradients of
    upper triangles were rounded to fp16, which did not hold them."""
    torch.manual_seed(0)
    query, key, value, grad_out = torch.randn(4, 1, 2, 64, 16)
    query, key, value = ((4 * tensor).half() for tensor in (query, key, value))
    mask = qa.Mask(causal=True, window=3)
    grads = []
    for kernel in ("unfused", "dense"):
        out, lse = qa.attention_with_lse(query, key, value, mask, kernel=kernel)
        plan = qa.plan(
            64, heads=2, head_dim=16, dtype=torch.float16, levels=(7,), tile=2,
            layout="balanced", backward=True, kernel=kernel, attn_mask=mask,
        )  # fmt: skip
        grads.append(
            qa.attention_backward(
                grad_out, query, key, value, out, lse, mask, kernel=kernel, plan=plan
            )
        )
    for grad, expected in zip(*grads, strict=True):
        assert bool(expected.isfinite().all())
        torch.testing.assert_close(grad, expected, atol=0.05, rtol=0.02)
