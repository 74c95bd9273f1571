"""Tables that a ``score_mod`` of FlexAttention reads get their gradients on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask

import quorum_attention as qa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
HEADS, KV_HEADS, WIDTH = 4, 2, 64
NAMES = ("out", "query", "key", "value", "table", "slopes")
# Norm of the difference over the norm of what float64 gets.
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}
ScoreMod = Callable[..., torch.Tensor]
Rows = tuple[torch.Tensor, ...]


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 200)


def relative(table: torch.Tensor, slopes: torch.Tensor, n: int) -> ScoreMod:
    """A bias by head and distance, and a factor of each head."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * (1 + slopes[h]) + table[h, q - k + n]

    return score_mod


def draw(n: int, dtype: torch.dtype) -> tuple[Rows, torch.Tensor]:
    """query, key, value, table and slopes; and the upstream gradient."""
    torch.manual_seed(n)
    shapes = [(1, heads, n, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    attended = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    table = torch.randn(HEADS, 2 * n, device="cuda")
    slopes = torch.randn(HEADS, device="cuda") / 8
    upstream = torch.randn(shapes[0], device="cuda").to(dtype)
    return (*attended, table, slopes), upstream


def formula(inputs: Rows, upstream: torch.Tensor, mask_mod: Any, rows: int) -> Rows:
    """Output and gradients in float64, so many queries at a time."""
    n = inputs[0].shape[2]
    leaves = [tensor.double().requires_grad_() for tensor in inputs]
    query, key, value, table, slopes = leaves
    score_mod = relative(table, slopes, n)
    heads = torch.arange(HEADS, device="cuda")[:, None, None]
    keys = torch.arange(n, device="cuda")
    outs = []
    for start in range(0, n, rows):
        queries = torch.arange(start, min(n, start + rows), device="cuda")[:, None]
        shared_key = key.repeat_interleave(HEADS // KV_HEADS, 1)
        shared_value = value.repeat_interleave(HEADS // KV_HEADS, 1)
        block = slice(start, start + rows)
        scores = query[:, :, block] @ shared_key.mT * WIDTH**-0.5
        scores = score_mod(scores, 0, heads, queries, keys)
        if mask_mod is not None:
            hidden = ~mask_mod(0, heads, queries, keys)
            scores = scores.masked_fill(hidden, -torch.inf)
        out = scores.softmax(-1) @ shared_value
        out.backward(upstream[:, :, block].double())
        outs.append(out.detach())
    gradients = [leaf.grad for leaf in leaves]
    return (torch.cat(outs, 2), *(grad for grad in gradients if grad is not None))


def patched(
    inputs: Rows, upstream: torch.Tensor, mask_mod: Any, **options: Any
) -> Rows:
    """Output and gradients of FlexAttention's function in a block of ours."""
    n = inputs[0].shape[2]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    score_mod = relative(leaves[3], leaves[4], n)
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, None, None, n, n, "cuda")
    with qa.patched_flex_attention(min_tokens=0, **options):
        call: Any = flex.flex_attention
        out = call(*leaves[:3], score_mod, block_mask, enable_gqa=True)
        out.backward(upstream)
    gradients = [leaf.grad for leaf in leaves]
    return (out.detach(), *(grad for grad in gradients if grad is not None))


def assert_near(results: Rows, expected: Rows, tolerance: float) -> None:
    for name, result, exact in zip(NAMES, results, expected, strict=True):
        assert bool(result.isfinite().all()), name
        error = ((result.double() - exact).norm() / exact.norm()).item()
        print(f"{name} {error:.1e}", end="; ")
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mask_mod", [None, window])
@pytest.mark.parametrize("options", [{}, {"depth": 1}])
def test_gradients_of_tables(dtype: torch.dtype, mask_mod: Any, options: Any) -> None:
    """Undivided and cut, with key heads that are shared."""
    inputs, upstream = draw(700, dtype)
    expected = formula(inputs, upstream, mask_mod, 700)
    results = patched(inputs, upstream, mask_mod, **options)
    assert_near(results, expected, TOLERANCES[dtype])


def test_a_table_over_thirty_thousand_tokens() -> None:
    """Nothing of queries x keys is made."""
    n = 30_000
    inputs, upstream = draw(n, torch.bfloat16)
    expected = formula(inputs, upstream, None, 500)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = patched(inputs, upstream, None, budget="256MiB")
    taken = torch.cuda.max_memory_allocated() - before
    print(f"{taken / 2**20:.0f} MiB", end="; ")
    assert taken < 512 << 20  # scores of all pairs in bf16 are 6.7 GiB
    assert_near(results, expected, TOLERANCES[torch.bfloat16])
