"""The gradient of the log-sum-exp: right beside every kernel, on every route, inside
the budget."""

from __future__ import annotations

import pytest
import torch
from helpers.attention import (
    GRADIENT_TOLERANCE,
    Inputs,
    assert_close,
    fresh_generator,
    inputs,
)
from helpers.memory import usage
from helpers.passes import pass_of, smallest_budget

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")


def wanted(
    given: Inputs, grad_lse: torch.Tensor, *, out_too: bool = True,
    bias: torch.Tensor | float = 0.0, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The textbook by autograd in float64: of query, key, value, and of sinks."""
    q, k, v, *more = leaves = [
        t.detach().double().requires_grad_()
        for t in (*given.three, sinks)
        if t is not None
    ]
    shared = q.shape[-3] // k.shape[-3]
    keys, values = (t.repeat_interleave(shared, dim=-3) for t in (k, v))
    s = q @ keys.mT * q.shape[-1] ** -0.5 + bias
    column = [t[:, None, None].expand(*s.shape[:-1], 1) for t in more]
    lse = torch.cat([s, *column], dim=-1).logsumexp(dim=-1)
    upstream = (given.grad_out.double() * out_too, grad_lse.double())
    return torch.autograd.grad(
        ((s - lse[..., None]).exp() @ values, lse), leaves, upstream
    )


def upstream_of(given: Inputs, size: float = 1.0) -> torch.Tensor:
    dtype = torch.promote_types(given.query.dtype, torch.float32)
    return size * torch.randn(
        given.query.shape[:-1], generator=fresh_generator(), dtype=dtype
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_alone_and_beside_outputs_of_another_size(
    dtype: torch.dtype, kernel: str
) -> None:
    """Where nothing arrives at the output, values get 0. Sizes far from the outputs'
    are divided by a scaled backward in fp16. (Every kernel and route: random calls.)"""
    given = inputs(150, 170, batch=(2,), heads=4, kv_heads=2, value_dim=5, dtype=dtype)
    leaves = [t.requires_grad_() for t in given.three]
    out, lse = qa.attention_with_lse(
        *leaves, enable_gqa=True, kernel=kernel, budget="9 MiB"
    )
    for size in (1e-3, 1e3):
        grad_lse = upstream_of(given, size)
        exact = wanted(given, grad_lse)
        upstream = given.grad_out, grad_lse
        found = torch.autograd.grad((out, lse), leaves, upstream, retain_graph=True)
        assert_close(found, exact, GRADIENT_TOLERANCE[dtype])
    found = torch.autograd.grad(lse, leaves, grad_lse)
    assert_close(
        found, wanted(given, grad_lse, out_too=False), GRADIENT_TOLERANCE[dtype]
    )
    assert not found[2].any()


def test_rows_without_keys_pass_nothing_on() -> None:
    given = inputs(20, dtype=torch.float64)
    keep = torch.ones(20, 20, dtype=torch.bool)
    keep[3] = False
    bias = (
        torch.zeros(20, 20, dtype=torch.float64)
        .masked_fill(~keep, -torch.inf)
        .requires_grad_()
    )
    for mask in (keep, bias):
        leaf = given.query.clone().requires_grad_()
        _, lse = qa.attention_with_lse(leaf, given.key, given.value, mask, depth=1)
        upstream = torch.ones_like(lse)
        upstream[..., 3] = torch.nan  # as of what follows -inf it may well be
        lse.backward(upstream)
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[..., 3, :].any()
    assert bias.grad.isfinite().all()
    assert not bias.grad[3].any()


def test_the_backward_as_a_function() -> None:
    given = inputs(60)
    grad_lse = upstream_of(given)
    run, exact = pass_of(given, True), wanted(given, grad_lse)
    for upstream in (grad_lse, grad_lse.double().mT.contiguous().mT):
        found = run(grad_lse=upstream)
        assert all(mine.is_contiguous() for mine in found)
        assert_close(found, exact, 5e-5)
    room = tuple(torch.empty_like(t, dtype=torch.float64) for t in given.three)
    found = run(grad_lse=grad_lse, grads=room)
    assert all(mine is target for mine, target in zip(found, room, strict=True))
    assert_close(room, exact, 5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_counts_the_columns(dtype: torch.dtype) -> None:
    given = inputs(700, heads=4, head_dim=16, dtype=dtype)
    grad_lse = upstream_of(given)
    call = pass_of(given, True, grad_lse=grad_lse)
    smallest = smallest_budget(
        lambda most: call(budget=most), match="the gradient of the log-sum-exp"
    )
    assert usage(lambda: call(budget=smallest)).peak <= smallest
    assert_close(
        call(budget=smallest), wanted(given, grad_lse), GRADIENT_TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("depth", [0, 1])
def test_beside_sinks_and_a_window(dtype: torch.dtype, depth: int) -> None:
    """Sinks are part of the log-sum-exp, and get their part of its gradient."""
    given = inputs(40, dtype=dtype)
    grad_lse = upstream_of(given)
    sinks = torch.randn(2, dtype=grad_lse.dtype)
    leaves = [t.clone().requires_grad_() for t in (*given.three, sinks)]
    mask = qa.Mask(causal=True, window=(9, 0), sinks=leaves[3])
    results = qa.attention_with_lse(*leaves[:3], mask, depth=depth)
    found = torch.autograd.grad(results, leaves, (given.grad_out, grad_lse))
    apart = torch.arange(40)[:, None] - torch.arange(40)
    bias = (
        torch.zeros(40, 40).masked_fill((apart < 0) | (apart > 9), -torch.inf).double()
    )
    exact = wanted(given, grad_lse, bias=bias, sinks=sinks)
    assert_close(found, exact, GRADIENT_TOLERANCE[dtype])


@pytest.mark.parametrize("wider", [torch.float32, torch.float64])
def test_small_upstream_gradients_are_not_lost_beside_it(wider: torch.dtype) -> None:
    """Gradients of 1e-6 in a wider dtype, for fp16 inputs with values of thousands."""
    given = inputs(60, dtype=torch.float16)
    given.value.mul_(5000)
    given.grad_out = given.grad_out.to(wider) * 1e-6
    grad_lse = upstream_of(given, 1e-3)
    room = tuple(torch.empty_like(t, dtype=wider) for t in given.three)
    found = pass_of(given, True, grad_lse=grad_lse, depth=1, grads=room)()
    for mine, exact in zip(found, wanted(given, grad_lse), strict=True):
        assert_close(mine / exact.abs().max(), exact / exact.abs().max(), 1e-2)


def test_rows_without_a_gradient_do_not_scale_the_others_down() -> None:
    """Values near fp16's largest number beside small gradients, of which some are 0."""
    given = inputs(400, 500, heads=4, dtype=torch.float16)
    given.value.copy_(torch.sign(given.value.float()) * 60_000)
    grad_lse = upstream_of(given, 1e-4)
    grad_lse[..., ::2] = 0.0
    leaves = [t.clone().requires_grad_() for t in given.three]
    _, lse = qa.attention_with_lse(*leaves, depth=1)
    found = torch.autograd.grad(lse, leaves[:2], grad_lse)
    for mine, exact in zip(
        found, wanted(given, grad_lse, out_too=False)[:2], strict=True
    ):
        # Some of these gradients are among fp16's smallest numbers.
        assert float((mine.double() - exact).abs().max()) <= 4 * 2.0**-24


def test_small_values_under_a_mask_that_many_rows_share() -> None:
    """A key that all rows attend to, inputs and output gradients of 1e-3, gradients of
    100 of the log-sum-exp: what is carried for it must not overflow where no gradient
    does."""
    given = inputs(400, dtype=torch.float16)
    for tensor in given.three:
        tensor.mul_(4e-3)
    given.grad_out.mul_(2e-3)
    mask = torch.zeros(1, 1, 1, 400, dtype=torch.float16)
    mask[..., 7] = 6.0
    grad_lse = upstream_of(given, 40.0)
    leaves = [t.clone().requires_grad_() for t in given.three]
    report = qa.Report()
    results = qa.attention_with_lse(*leaves, attn_mask=mask, depth=1, report=report)
    found = torch.autograd.grad(results, leaves, (given.grad_out, grad_lse))
    assert report.backward.repeated_units == 0
    for mine, true in zip(
        found, wanted(given, grad_lse, bias=mask.double()), strict=True
    ):
        off = float((mine.double() - true).abs().max())
        assert off <= 2e-3 * float(true.abs().max()) + 2.0**-24
