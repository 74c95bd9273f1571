"""Calls beyond what an operator takes at a time are cut, and their results are those of
one call.

The operators' own limits are too large for a test without a GPU. So the textbook plays
an operator with small limits, and fails where it is given more.
"""

from __future__ import annotations

import dataclasses
import random

import helpers.attention as textbook
import pytest
import torch
from helpers.attention import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    Inputs,
    error,
    exact,
    inputs,
)

import quorum_attention as qa
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.cudnn import CudnnKernel
from quorum_attention.kernels.efficient import EfficientKernel
from quorum_attention.kernels.fa4 import Fa4Kernel
from quorum_attention.kernels.flash import FlashKernel
from quorum_attention.kernels.limits import (
    INT32,
    NO_LIMIT,
    CallLimits,
    CallSizes,
    call_parts,
)
from quorum_attention.kernels.operator_call import Call, Saved, Three
from quorum_attention.kernels.operator_sizes import OperatorSizes
from quorum_attention.kernels.rectangles import RectangleKernel


class LimitedTextbook(RectangleKernel):
    """The textbook as an operator that takes no call beyond its limits.

    Attributes:
        forward_calls, backward_calls: how many calls it got.
    """

    name = "limited"

    def __init__(self, limits: CallLimits, *, grouped: bool = True) -> None:
        self.forward_limits = self.backward_limits = limits
        self.grouped = grouped
        self.forward_calls = self.backward_calls = 0

    def refusal(self, shape: CallShape) -> str | None:
        return None

    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        self.forward_calls += 1
        query, key, value, bias = self._operands(call)
        return textbook.attention(
            query, key, value, is_causal=call.causal, scale=call.scale, bias=bias
        )

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        self.backward_calls += 1
        query, key, value, bias = self._operands(call)
        grad_query, grad_key, grad_value = textbook.gradients(
            saved.grad_out, query, key, value, saved.out, saved.lse,
            is_causal=call.causal, scale=call.scale, bias=bias,
        )  # fmt: skip
        entries, key_heads = call.key.shape[:2]
        of_group = (entries, key_heads, -1)
        grad_key, grad_value = (
            grad.reshape(*of_group, *grad.shape[2:]).sum(2)
            for grad in (grad_key, grad_value)
        )
        return grad_query, grad_key, grad_value

    def _operands(self, call: Call) -> tuple[torch.Tensor, ...]:
        _check_limits(self.forward_limits, call)
        group = call.query.shape[1] // call.key.shape[1]
        assert group == 1 or self.grouped
        key, value = (t.repeat_interleave(group, 1) for t in (call.key, call.value))
        return call.query, key, value, 0.0 if call.bias is None else call.bias

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        return OperatorSizes(
            shape, extent, self.grouped, limits=self.forward_limits
        ).forward_bytes(shape.value_dim, 0)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        sizes = OperatorSizes(shape, extent, self.grouped, limits=self.backward_limits)
        return sizes.backward_bytes(0)


def _check_limits(limits: CallLimits, call: Call) -> None:
    entries, heads, queries, head_dim = call.query.shape
    keys, value_dim = call.value.shape[2:]
    assert entries <= limits.entries
    assert heads <= limits.heads
    counted = {
        "call": entries * heads,
        "several entries": entries * heads if entries > 1 else 0,
        "entry": heads,
        "head": 1,
    }[limits.scope]
    width = max(head_dim, value_dim)
    assert counted * queries * width <= limits.query_elements
    assert counted * keys * width <= limits.key_elements


def _random_limits(r: random.Random) -> CallLimits:
    return CallLimits(
        r.choice([1, 2, 3, NO_LIMIT]),
        r.choice([1, 2, 3, 5, NO_LIMIT]),
        r.choice([40, 300, 2_000, NO_LIMIT]),
        r.choice([40, 300, 2_000, NO_LIMIT]),
        r.choice(["call", "several entries", "entry", "head"]),
    )


def _random_inputs(
    r: random.Random, dtype: torch.dtype, key_heads: int, group: int
) -> Inputs:
    n_queries, n_keys = r.randint(1, 40), r.randint(1, 40)
    given = inputs(
        n_queries, n_keys, batch=(r.randint(1, 7),), heads=key_heads * group, kv_heads=key_heads,
        head_dim=r.choice([4, 8]), value_dim=r.choice([4, 8]), dtype=dtype,
    )  # fmt: skip
    if r.random() < 0.5:
        # Tokens before heads, as models have them.
        given = Inputs(
            *(
                t.transpose(1, 2).contiguous().transpose(1, 2)
                for t in vars(given).values()
            )
        )
    return given


def _random_mask(r: random.Random, given: Inputs) -> torch.Tensor | None:
    if r.random() < 0.5:
        return None
    sizes = (*given.query.shape[:3], given.key.shape[2])
    mask = torch.randn([r.choice([1, size]) for size in sizes], dtype=given.query.dtype)
    return mask.masked_fill(torch.rand(mask.shape) < 0.1, -torch.inf)


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's first call is not preceded by its test, which takes thousands of such
    parts."""
    monkeypatch.setattr("quorum_attention.kernels.select.probe", lambda *args: None)


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("turn", range(6))
def test_cut_calls_are_right(turn: int) -> None:
    """Batch entries, heads, groups of query heads and rows: whatever is too much for
    one call."""
    r = random.Random(torch.initial_seed())
    for _ in range(10):
        kernel = LimitedTextbook(_random_limits(r), grouped=r.random() < 0.7)
        dtype = r.choice([torch.float64, torch.float32])
        given = _random_inputs(r, dtype, r.randint(1, 4), r.choice([1, 1, 2, 3, 6]))
        mask, is_causal = _random_mask(r, given), r.random() < 0.3
        depth = r.choice(["auto", "auto", 0, 1])
        three = [t.detach().requires_grad_() for t in given.three]
        out, lse = qa.attention_with_lse(
            *three,
            mask,
            is_causal=is_causal,
            enable_gqa=True,
            kernel=kernel,
            depth=depth,
        )
        grads = torch.autograd.grad(out, three, given.grad_out)
        right = exact(given, mask=mask, is_causal=is_causal, gradients=True)
        assert error(out, right.out) < TOLERANCE[dtype], kernel.forward_limits
        assert error(lse, right.lse) < TOLERANCE[dtype], kernel.forward_limits
        assert right.grads is not None
        for grad, right_grad in zip(grads, right.grads, strict=True):
            assert error(grad, right_grad) < GRADIENT_TOLERANCE[dtype], (
                kernel.forward_limits
            )


@pytest.mark.usefixtures("unprobed")
def test_many_entries_go_into_one_part() -> None:
    """Parts are as large as the limits let them be, and of equal sizes."""
    kernel = LimitedTextbook(CallLimits(entries=1_000))
    query, key, value = (
        torch.randn(2_500, 2, 3, 4, requires_grad=True) for _ in range(3)
    )
    out = qa.attention(query, key, value, kernel=kernel)
    out.sum().backward()
    assert (kernel.forward_calls, kernel.backward_calls) == (3, 3)
    calls = call_parts(kernel.forward_limits, CallSizes(2_500, 2, 1, 3, 3, 4))
    assert [part.query_rows[0] for part in calls] == [
        slice(0, 834), slice(834, 1668), slice(1668, 2500),
    ]  # fmt: skip


@pytest.mark.usefixtures("unprobed")
def test_a_cut_result_lies_as_an_uncut_one() -> None:
    """As the query does: a caller may view it with heads and columns joined."""
    kernel = LimitedTextbook(CallLimits(entries=2))
    query, key, value = (torch.randn(5, 7, 3, 4).transpose(1, 2) for _ in range(3))
    out = qa.attention(query, key, value, kernel=kernel)
    assert kernel.forward_calls == 3
    assert out.transpose(1, 2).view(5, 7, 12).shape == (5, 7, 12)


def _sizes(entries: int, heads: int, queries: int, keys: int, width: int) -> CallSizes:
    return CallSizes(entries, heads, 1, queries, keys, width)


def test_the_limits_that_were_found() -> None:
    """Just below and just above, for sizes that were tried on an H200
    (docs/kernels.md)."""
    cudnn, flash, efficient = CudnnKernel(), FlashKernel(), EfficientKernel()
    for kernel in (cudnn, flash, Fa4Kernel()):
        for limits in (kernel.forward_limits, kernel.backward_limits):
            assert limits.largest(_sizes(65_535, 1, 8, 8, 32)) == (65_535, 1)
            assert limits.largest(_sizes(70_000, 4, 8, 8, 32)) == (65_535, 4)
            assert limits.largest(_sizes(1, 70_000, 8, 8, 32)) == (1, 65_535)
    assert efficient.forward_limits.largest(_sizes(70_000, 4, 8, 8, 32)) == (65_535, 4)
    assert efficient.forward_limits.largest(_sizes(1, 70_000, 8, 8, 32)) == (1, 65_535)

    # dQ and dK of cuDNN were wrong in the second call of each pair.
    of_cudnn = cudnn.backward_limits
    for right, wrong in (
        (_sizes(1, 32, 524_160, 128, 128), _sizes(1, 32, 530_000, 128, 128)),
        (_sizes(1, 32, 1_048_320, 128, 64), _sizes(1, 32, 1_060_000, 128, 64)),
        (_sizes(399, 4, 10_496, 128, 128), _sizes(400, 4, 10_496, 128, 128)),
    ):
        assert of_cudnn.largest(right) == (right.entries, right.key_heads)
        assert of_cudnn.largest(wrong) != (wrong.entries, wrong.key_heads)
        assert cudnn.forward_limits.largest(wrong) == (wrong.entries, wrong.key_heads)
    many_keys = _sizes(1, 32, 128, 1_049_000, 128)
    assert of_cudnn.largest(many_keys) == (1, 32)
    # The query heads of a key/value head are counted with it.
    assert of_cudnn.largest(CallSizes(1, 8, 4, 530_000, 128, 128)) == (1, 7)

    assert flash.backward_limits.largest(_sizes(1, 32, 1_049_000, 128, 128)) == (1, 32)
    assert flash.backward_limits.largest(_sizes(30_000, 4, 66, 66, 128)) == (30_000, 4)
    assert flash.backward_limits.largest(_sizes(60_000, 4, 66, 66, 128))[0] < 60_000
    assert efficient.forward_limits.largest(_sizes(800, 4, 10_496, 128, 128)) == (
        800,
        4,
    )
    assert efficient.forward_limits.largest(many_keys)[1] < 32


def test_rows_beyond_a_limit() -> None:
    """A single head that is too large is not taken whole; its rows are cut into whole
    tiles."""
    kernel = Fa4Kernel()
    shape = CallShape("cuda", torch.bfloat16, 1, 1, 128, 128, needs_grad=True)
    short, long = (
        dataclasses.replace(shape, n_queries=n, n_keys=128)
        for n in (16_700_000, 17_000_000)
    )
    assert kernel.takes_whole(short, 16_700_000, True)
    assert not kernel.takes_whole(long, 17_000_000, True)
    assert kernel.takes_whole(
        dataclasses.replace(long, needs_grad=False), 17_000_000, True
    )
    queries, keys = kernel.backward_limits.rows(128)
    assert queries == keys == INT32 // 128 // 128 * 128


def test_workspaces_of_cut_calls() -> None:
    """One part at a time, beside the results of all."""
    kernel = CudnnKernel()
    shape = CallShape("cuda", torch.bfloat16, 32, 32, 128, 128, needs_grad=True)
    bounds = []
    for n_queries in (524_160, 530_000):
        extent = Extent(1, 32, 32, n_queries, n_queries, 128, direct=True)
        bounds.append(kernel.backward_workspace_bytes(shape, extent))
    below, above = bounds
    result_bytes = 32 * 530_000 * 128 * 2
    # A part has half of the heads, and its fp32 sums are twice as large as a result.
    assert above < below
    assert above > 2 * result_bytes
