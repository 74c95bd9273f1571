"""The memory-efficient kernel beside its operator, written out in torch: what it is
handed, and what it returns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # looks at the operators, which a test replaces

from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.efficient import EfficientKernel
from quorum_attention.kernels.operator_call import Call, Saved

_PREFIX = "_scaled_dot_product_efficient_attention"


def _check_readable(tensor: torch.Tensor) -> None:
    """The operator refuses rows that are no whole words, and strides beyond 32 bits
    even in dimensions of size 1."""
    assert tensor.shape[-1] * tensor.element_size() % 16 == 0
    assert tensor.stride(-1) == 1
    for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
        assert stride == 0 if size == 1 else stride * tensor.element_size() % 16 == 0


def _forward(query, key, value, bias, _lse, _p, causal, *, scale):  # type: ignore[no-untyped-def]
    for tensor in (query, key, value):
        _check_readable(tensor)
    out, lse = _attention(query, key, value, bias, causal, scale)
    missing = -lse.shape[-1] % 32
    return out, torch.nn.functional.pad(lse, (0, missing), value=torch.inf), None, None


def _backward(
    grad_out,
    query,
    key,
    value,
    bias,
    out,
    lse,
    _seed,
    _offset,
    _p,
    wanted,
    causal,
    *,
    scale,
):  # type: ignore[no-untyped-def]
    for tensor in (grad_out, query, key, value):
        _check_readable(tensor)
    n = out.shape[2]
    assert out.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous()
    assert lse.data_ptr() % 16 == 0
    assert lse.shape[-1] % 32 == 0
    assert bool((lse[..., n:] == torch.inf).all())
    leaves = [t.double().requires_grad_() for t in (query, key, value)]
    scores_bias = None if bias is None else bias.double().requires_grad_()
    exact, exact_lse = _attention(*leaves, scores_bias, causal, scale)
    torch.testing.assert_close(exact_lse.float(), lse[..., :n])
    of_bias = wanted[3]
    inputs = [*leaves, scores_bias] if of_bias else leaves
    grads = torch.autograd.grad(exact, inputs, grad_out.double())
    rounded = [grad.to(query.dtype) for grad in grads]
    return (*rounded, *[None] * (4 - len(rounded)))


def _attention(query, key, value, bias, causal, scale):  # type: ignore[no-untyped-def]
    scores = query @ key.mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> EfficientKernel:
    monkeypatch.setattr(torch.ops.aten, _PREFIX, _forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, f"{_PREFIX}_backward", _backward, raising=False)
    return EfficientKernel()


def _rows(batch: int, heads: int, n: int, width: int, order: str) -> torch.Tensor:
    """Rows head after head, token after token, or with gaps that a dimension of one
    entry has."""
    if order == "heads":
        return torch.randn(batch, heads, n, width)
    by_token = torch.randn(batch, n, heads, width).transpose(1, 2)
    if order == "tokens":
        return by_token
    return by_token.as_strided(
        by_token.shape, [2**40 if batch == 1 else 1, *by_token.stride()[1:]]
    )


@pytest.mark.parametrize("order", ["heads", "tokens", "far"])
@pytest.mark.parametrize(
    "sizes", [(1, 3, 32, 32), (2, 1, 1, 7), (2, 3, 49, 20), (1, 1, 64, 64)]
)
@pytest.mark.parametrize("widths", [(16, 16), (16, 5), (6, 16)])
@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_it_hands_over_what_the_operator_reads(
    kernel: EfficientKernel, order: str, sizes: tuple[int, ...], widths: tuple[int, int],
    scale: float,
) -> None:  # fmt: skip
    """With a bias, whose gradient comes with the others."""
    batch, heads, n, m = sizes
    if order == "far" and batch > 1:
        batch = 1
    query, key = (_rows(batch, heads, rows, widths[0], order) for rows in (n, m))
    value, grad_out = (_rows(batch, heads, rows, widths[1], order) for rows in (m, n))
    bias = torch.randn(1, heads, n, m)
    call = Call(query, key, value, False, scale, bias)
    out, lse = kernel.whole_forward(call)
    leaves = [t.double().requires_grad_() for t in (query, key, value, bias)]
    exact, exact_lse = _attention(*leaves, False, scale)
    torch.testing.assert_close(
        (out.double(), lse.double()), (exact, exact_lse), atol=1e-4, rtol=0
    )
    wanted = list(torch.autograd.grad(exact, leaves, grad_out.double()))
    saved = Saved(grad_out, out, lse)
    grads: Any = kernel.whole_backward_with_bias(call, saved)
    others = kernel.whole_backward(call, saved)
    summed = grads[3].sum(0, keepdim=True)
    for grad, expected in zip((*grads[:3], summed), wanted, strict=True):
        torch.testing.assert_close(grad.double(), expected, atol=1e-4, rtol=0)
    for grad, other in zip(grads[:3], others, strict=True):
        assert torch.equal(grad, other)


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_the_lse_of_rows_that_begin_anywhere(
    kernel: EfficientKernel, first: int
) -> None:
    """The operator reads four numbers at a time: where a part of the rows began at an
    address of its own, it ended with "misaligned address"."""
    n, m = 64, 20
    query, key, value = (torch.randn(1, 1, rows, 16) for rows in (n, m, m))
    call = Call(query, key, value, False, 0.5)
    out, lse = kernel.whole_forward(call)
    rows = torch.empty(1, 1, first + n)[..., first:].copy_(lse)
    grad_out = torch.randn(out.shape)
    grads = kernel.whole_backward(call, Saved(grad_out, out, rows))
    others = kernel.whole_backward(call, Saved(grad_out, out, lse))
    for grad, other in zip(grads, others, strict=True):
        assert torch.equal(grad, other)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ["heads", "tokens"])
def test_grouped_heads_are_a_few_calls_of_views(
    kernel: EfficientKernel,
    monkeypatch: pytest.MonkeyPatch,
    order: str,
    causal: bool,
) -> None:
    """Forty entries of grouped heads: not a call of the operator for each of them."""
    names: list[str] = []

    def counting(name: str, operator: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            names.append(name)
            return operator(*args, **named)

        return call

    for name, operator in ((_PREFIX, _forward), (f"{_PREFIX}_backward", _backward)):
        monkeypatch.setattr(torch.ops.aten, name, counting(name, operator))
    batch, n = 40, 5
    query, grad_out = (_rows(batch, 4, n, 16, order) for _ in range(2))
    key, value = (_rows(batch, 2, n, 16, order) for _ in range(2))
    call = Call(query, key, value, causal, 0.5)
    out, lse = kernel.whole_forward(call)
    with torch.enable_grad():
        grads = kernel.whole_backward(call, Saved(grad_out, out, lse))
    assert len(names) <= 4
    leaves = [t.double().requires_grad_() for t in (query, key, value)]
    key_of_each, value_of_each = (t.repeat_interleave(2, 1) for t in leaves[1:])
    exact, exact_lse = _attention(
        leaves[0], key_of_each, value_of_each, None, causal, 0.5
    )
    wanted = torch.autograd.grad(exact, leaves, grad_out.double())
    torch.testing.assert_close(
        (out.double(), lse.double()), (exact, exact_lse), atol=1e-4, rtol=0
    )
    for grad, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), expected, atol=1e-4, rtol=0)


def test_a_copy_that_a_mask_runs_for_all_heads_has_room_for_them() -> None:
    """Parts under a mask regroup heads: each query head then has keys, and gradients of
    keys, as if there were no groups."""

    def bounds(kernel: EfficientKernel, kv_heads: int) -> tuple[int, int]:
        shape = CallShape(
            "cuda",
            torch.float32,
            heads=8,
            kv_heads=kv_heads,
            head_dim=64,
            value_dim=64,
        )
        extent = Extent(1, 8, kv_heads, 2048, max_queries=1024, max_keys=1024)
        forward = kernel.forward_workspace_bytes(shape, extent)
        return forward, kernel.backward_workspace_bytes(shape, extent)

    together = copy.copy(EfficientKernel())
    together.grouped = True
    without_groups = bounds(EfficientKernel(), 8)
    for regrouped, equal in zip(bounds(together, 1), without_groups, strict=True):
        assert regrouped >= equal


@pytest.mark.parametrize(("n_queries", "n_tiles"), [(8, 1), (64, 1), (65, 2)])
def test_tiny_entries_are_planned_with_a_tile_of_64_for_each_head(
    n_queries: int, n_tiles: int
) -> None:
    """Tiles of 128 were counted: 22.2 GiB where 2.6 were measured. No less is planned
    than torch's ``workspace_size`` in ``kernel_backward.h``."""
    heads, width = 8, 16
    shape = CallShape(
        "cuda",
        torch.float32,
        heads=heads,
        kv_heads=heads,
        head_dim=width,
        value_dim=width,
    )
    batch = 32_768
    extent = Extent(batch, heads, heads, n_queries, n_queries, 8, direct=True)
    planned = EfficientKernel().backward_workspace_bytes(shape, extent)
    operator_bytes = batch * heads * n_tiles * (64 * 64 + 4) * 4
    gradient_bytes = batch * heads * (n_queries + 2 * 8) * width * 4
    assert planned >= operator_bytes + gradient_bytes
    assert planned <= operator_bytes + 6 * gradient_bytes
