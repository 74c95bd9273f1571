"""Grouped heads on torch's operator for CPUs, whose form depends on the call."""

from __future__ import annotations

import pytest
import torch
from helpers.memory import usage

import quorum_attention as qa
from quorum_attention.kernels import get_kernel
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.kernels.operator_call import Call, Saved


def _inputs(
    heads: int, key_heads: int, n_queries: int, n_keys: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    sizes = [(heads, n_queries), (key_heads, n_keys), (key_heads, n_keys)]
    return [torch.randn(2, *size, 16).to(dtype) for size in sizes]


def _gradients(
    three: list[torch.Tensor], grad_out: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in three]
    out = qa.attention(*leaves, is_causal=causal, enable_gqa=True, devices="cpu")
    return torch.autograd.grad(out, leaves, grad_out)


def _error(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    return float((gradient.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("heads", "key_heads"), [(8, 2), (6, 1)])
@pytest.mark.parametrize(
    ("n_queries", "causal"),
    [(1, False), (4, False), (33, False), (200, False), (33, True), (200, True)],
)
@pytest.mark.parametrize(
    ("dtype", "unit"),
    [
        (torch.float64, 2.0**-53),
        (torch.float32, 2.0**-24),
        (torch.float16, 2.0**-11),
        (torch.bfloat16, 2.0**-8),
    ],
    ids=str,
)
def test_gradients_are_as_exact_as_sums_of_each_heads_gradient(
    dtype: torch.dtype,
    unit: float,
    n_queries: int,
    heads: int,
    key_heads: int,
    causal: bool,
) -> None:
    """The operator's own sums over a group are rounded to 16 bits after each head: for
    six heads and 200 queries their errors are 1.4 to 1.7 times as large."""
    n_keys = n_queries if causal else 200
    three = _inputs(heads, key_heads, n_queries, n_keys, dtype)
    grad_out = torch.randn(2, heads, n_queries, 16).to(dtype)
    exact = _gradients([t.double() for t in three], grad_out.double(), causal=causal)
    group = heads // key_heads
    query, *key_and_value = three
    equal = [query, *[t.repeat_interleave(group, 1) for t in key_and_value]]
    by_head = _gradients(equal, grad_out, causal=causal)
    expected = [by_head[0]]
    for gradient in by_head[1:]:
        expected.append(gradient.double().unflatten(1, (key_heads, group)).sum(2))
    gradients = _gradients(three, grad_out, causal=causal)
    for gradient, sum_of_heads, right in zip(gradients, expected, exact, strict=True):
        assert gradient.dtype == dtype
        assert gradient.shape == right.shape
        if dtype.itemsize > 2:
            assert _error(gradient, right) < 32 * unit
            continue
        # What rounds the sum once, beside the errors of the heads' gradients.
        largest = 1.1 * _error(sum_of_heads, right) + unit / 2
        assert _error(gradient, right) < largest


@pytest.mark.parametrize(
    ("dtype", "n_queries", "causal", "heads_of_backward"),
    [
        (torch.float32, 1, False, (8, 2)),  # the operator's own grouped heads
        (torch.float32, 64, True, (8, 2)),
        (torch.float32, 200, True, (4, 4)),  # too many sums
        (torch.bfloat16, 8, False, (2, 2)),  # a group is the rows of one head
        (torch.bfloat16, 9, False, (4, 4)),  # too many rows to be summed at once
        (torch.bfloat16, 8, True, (4, 4)),
    ],
    ids=str,
)
def test_the_form_of_a_backward(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    n_queries: int,
    causal: bool,
    heads_of_backward: tuple[int, int],
) -> None:
    """Expanded gradients of keys are written and read once for each query head, which
    takes a step of decoding 1.0 ms of its 1.6 ms."""
    if dtype == torch.float32 and torch.__version__ < "2.9":
        pytest.skip("torch's operator has grouped heads from 2.9 on")
    seen = []
    backward = CpuKernel.rectangle_backward

    def see(kernel: CpuKernel, call: Call, saved: object) -> object:
        seen.append((call.query.shape[1], call.key.shape[1]))
        return backward(kernel, call, saved)  # type: ignore[arg-type]

    n_keys = n_queries if causal else 200
    three = _inputs(8, 2, n_queries, n_keys, dtype)
    grad_out = torch.randn(2, 8, n_queries, 16).to(dtype)
    _gradients(
        three, grad_out, causal=causal
    )  # before its first call a kernel is tested
    monkeypatch.setattr(CpuKernel, "rectangle_backward", see)
    _gradients(three, grad_out, causal=causal)
    assert seen == [heads_of_backward]


def test_an_older_operator_gets_no_grouped_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch 2.9 it took the number of query heads for that of key heads."""
    monkeypatch.setattr("quorum_attention.kernels.cpu._TAKES_GROUPS", False)
    query, key, value = _inputs(8, 2, 1, 200, torch.float32)
    kernel = get_kernel("cpu")
    assert isinstance(kernel, CpuKernel)
    for backward in (False, True):
        for causal in (False, True):
            call = Call(query, key, value, causal)
            assert not kernel.takes_groups(call, backward=backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_group_of_rows_stays_within_the_kernels_bytes(dtype: torch.dtype) -> None:
    """The tiles of a thread have the rows of a group, not of a head. With 64 threads
    they are most of what a short call takes."""
    kernel = CpuKernel()
    three = _inputs(32, 1, 1, 512, dtype)
    call = Call(*three)
    shape = CallShape("cpu", dtype, 32, 1, 16, 16, needs_grad=True)
    extent = Extent(2, 32, 1, 512, 1, 512, direct=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        out, lse = kernel.whole_forward(call)
        saved = Saved(torch.randn_like(out), out, lse)
        forward = usage(lambda: kernel.whole_forward(call))
        backward = usage(lambda: kernel.whole_backward(call, saved))
        assert forward.peak <= kernel.forward_workspace_bytes(shape, extent)
        assert backward.peak <= kernel.backward_workspace_bytes(shape, extent)
    finally:
        torch.set_num_threads(threads)
