"""A result lies in memory as the query does, however a call is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.kernels.result_layout import result_strides

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 4, 20, 8

# By name: a query (batch, heads, tokens, head_dim), and its dimensions from the
# outermost inwards.
QUERIES: dict[str, tuple[Callable[[], torch.Tensor], tuple[int, ...]]] = {
    "head-major": (lambda: torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM), (0, 1, 2, 3)),
    "token-major": (
        lambda: torch.randn(BATCH, TOKENS, HEADS, HEAD_DIM).transpose(1, 2), (0, 2, 1, 3)
    ),
    "tokens first": (
        lambda: torch.randn(TOKENS, BATCH, HEADS, HEAD_DIM).permute(1, 2, 0, 3), (2, 0, 1, 3)
    ),
    "a part of qkv": (
        lambda: torch.randn(BATCH, TOKENS, 3, HEADS, HEAD_DIM)[:, :, 0].transpose(1, 2),
        (0, 2, 1, 3),
    ),
    "head_dim not last": (
        lambda: torch.randn(BATCH, HEADS, HEAD_DIM, TOKENS).transpose(2, 3), (0, 1, 2, 3)
    ),
    "expanded": (
        lambda: torch.randn(TOKENS, 1, HEAD_DIM).transpose(0, 1).expand(BATCH, HEADS, -1, -1),
        (0, 1, 2, 3),
    ),
}  # fmt: skip
ROUTES: dict[str, dict[str, Any]] = {
    "one kernel call": {},
    "causal": {"is_causal": True},
    "cut": {"depth": 1},
    "cut twice": {"depth": 2},
    "dense": {"kernel": "dense"},
    "under a mask": {"attn_mask": Mask(window=(9, 0))},
    "with an additive mask": {"attn_mask": torch.zeros(TOKENS, TOKENS)},
    "lengths of entries": {"attn_mask": Mask(key_lengths=torch.arange(BATCH) * 3 + 2)},
    "scattered documents": {"attn_mask": Mask(documents=torch.arange(TOKENS) % 3)},
    "with sinks": {"attn_mask": Mask(sinks=torch.zeros(HEADS))},
    "with a soft cap": {"attn_mask": Mask(softcap=3.0)},
    "with dropout": {"dropout_p": 0.1},
    "wider": {"out_dtype": torch.float64},
}


def order_of(result: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the outermost inwards; of a dense tensor."""
    order = sorted(range(result.dim()), key=result.stride, reverse=True)
    assert result.permute(order).is_contiguous()
    return tuple(order)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("layout", QUERIES)
@pytest.mark.parametrize("value_dim", [8, 12, 5])
def test_every_route_has_the_querys_order(layout: str, value_dim: int) -> None:
    """``out.transpose(1, 2).view(...)`` raised where a call was cut, but not where it
    was not."""
    make, order = QUERIES[layout]
    for kv_heads in (HEADS, 2):
        query = make().requires_grad_()
        key = torch.randn(BATCH, kv_heads, TOKENS, HEAD_DIM)
        value = torch.randn(BATCH, TOKENS, kv_heads, value_dim).transpose(1, 2)
        for name, options in ROUTES.items():
            print(name, kv_heads)
            out = qa.attention(query, key, value, enable_gqa=True, **options)
            assert order_of(out) == order
            with torch.no_grad():
                again = qa.attention(query, key, value, enable_gqa=True, **options)
            assert order_of(again) == order
            torch.autograd.grad(out.sum(), query)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("layout", "dynamic"),
    [("token-major", None), ("a part of qkv", True), ("expanded", None)],
)
def test_compiled_calls_know_the_order_before_they_run(
    layout: str, dynamic: bool | None
) -> None:
    def call(
        query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        out = qa.attention(query, key, key, attn_mask=Mask(window=(9, 0)))
        return out, out.stride()

    make, order = QUERIES[layout]
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", dynamic=dynamic)
    query, key = make().requires_grad_(), torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM)
    out, traced = compiled(query, key)
    assert tuple(traced) == out.stride()
    assert order_of(out) == order
    torch.autograd.grad(out.sum(), query)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 1)])
@pytest.mark.parametrize("depth", [0, 1])
def test_any_number_of_batch_dimensions(shape: tuple[int, ...], depth: int) -> None:
    query = torch.randn(*shape, TOKENS, HEADS, HEAD_DIM).transpose(-3, -2)
    out = qa.attention(query, query, query, depth=depth)
    out.transpose(-3, -2).view(*shape, TOKENS, HEADS * HEAD_DIM)


@pytest.mark.parametrize("route", ROUTES)
def test_batch_dimensions_in_any_order(route: str) -> None:
    """Queries without a view (b, heads, n, d) are copied for some routes: their results
    lay as the copy did."""
    options = ROUTES[route]
    if route == "lengths of entries":
        options = {"attn_mask": Mask(key_lengths=torch.arange(15) + 2)}
    for order in list(itertools.permutations(range(4)))[1::3]:
        sizes = [(3, 5, HEADS, TOKENS)[dim] for dim in order]
        stored = torch.randn(*sizes, HEAD_DIM)
        query = stored.permute(*(order.index(dim) for dim in range(4)), 4)
        out = qa.attention(query, query, query, **options)
        assert order_of(out) == (*order, 4)


@pytest.mark.parametrize("sizes", [(0, 20), (20, 0)])
def test_results_without_pairs(sizes: tuple[int, int]) -> None:
    query, key = (torch.randn(2, n, HEADS, HEAD_DIM).transpose(1, 2) for n in sizes)
    out = qa.attention(query, key, key)
    out.transpose(1, 2).view(2, sizes[0], HEADS * HEAD_DIM)


def test_dimensions_of_one_entry_stay_outside() -> None:
    query = torch.randn(1, 5, 1, 8).transpose(1, 2)
    assert result_strides(query, (1, 1, 5, 6)) == (30, 30, 6, 1)
