"""The reference, tile by tile: as ``dense`` has it, whatever the tiles, within its
bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.attention import GRADIENT_TOLERANCE, TOLERANCE, assert_close
from helpers.memory import usage
from kernel_harness import Case, random_case, run

import quorum_attention as qa
from quorum_attention.kernels import (
    CpuKernel,
    DenseKernel,
    Extent,
    Gradients,
    InnerKernel,
    Statistics,
    score_tiles,
)
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.masked.user_functions import capped
from quorum_attention.kernels.operator_call import Call, Saved, whole_task
from quorum_attention.kernels.reference import TiledKernel

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("tile", [None, (200, 16, 7), (60, 5, 3), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("drops", [False, True])
def test_random_tasks_by_every_tile(
    tile: tuple[int, int, int] | None, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged into states that hold keys already; rows and tiles without keys, NaN in
    some."""
    if tile is not None:
        monkeypatch.setattr(score_tiles, "IN_CACHE", score_tiles.TileLimits(*tile))
    r, single = random.Random(str(tile)), tile == (1, 1, 1)
    kernel: InnerKernel = CpuKernel() if drops else TiledKernel()
    for number in range(5 if single else 15):
        dtype = r.choice([torch.float16, torch.bfloat16, torch.float32, torch.float64])
        case = random_case(r, dtype, 8 if single else 30, drops)
        if number % 5 == 4:
            case.query[:, 0, :1] = torch.nan
        wanted, found = (run(one, case, check=False) for one in (DenseKernel(), kernel))
        size = 20 * (1.0 if case.dropout is None else max(1.0, case.dropout.rescale))
        for name, other in wanted.items():
            gradient, one, odd = name.startswith("grad"), found[name], other.isnan()
            limits = GRADIENT_TOLERANCE if gradient else TOLERANCE
            assert gradient or torch.equal(one.isnan(), odd)
            one, other = (t.masked_fill(odd, 0.0) for t in (one, other))
            assert_close(one, other, limits[other.dtype] * size)


KERNELS: dict[str, Any] = {
    "cpu": CpuKernel(), "tiles": TiledKernel(), "capped": TiledKernel(capped(30.0)),
    "dense": DenseKernel(),
    "score_mod": qa.from_score_mod(
        lambda s, b, h, i, j: s * (1 + h) - (i - j).abs(), lambda b, h, i, j: i != j, compiled=False
    ),
}  # fmt: skip


@pytest.mark.slow_but_first
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", KERNELS)
def test_memory_is_bounded(kind: str, backward: bool) -> None:
    """By calls of all shapes, thin ones too."""
    r = random.Random(kind)
    for _ in range(6):
        batch, shared, key_heads = (
            r.choice([1, 3]),
            r.choice([1, 4]),
            r.choice([1, 5, 30]),
        )
        n, m = (r.choice([1, 3, 70, 600, 1500]) for _ in range(2))
        heads, whole = shared * key_heads, kind == "cpu"
        if batch * heads * n * m > 4e6:
            continue
        dtype = r.choice([torch.float16, torch.float32, torch.float64])
        work = torch.float64 if dtype == torch.float64 else torch.float32
        widths = r.choice([1, 16, 64]), r.choice([1, 16, 64])
        case = Case(n, m, dtype, batch, heads, key_heads, *widths)
        case.query[0, 0, 0] = r.choice([0.0, torch.nan])
        if kind != "score_mod" and r.random() < 0.5:
            sizes = (batch, heads, n, m)
            case.mask = torch.zeros(
                [r.choice([1, size]) for size in sizes], dtype=dtype
            )
        three, grad_out, bias = (
            (case.query, case.key, case.value),
            case.grad_out,
            case.mask,
        )
        call = replace(case.call("cpu"), dropout=whole)
        extent = Extent(batch, heads, key_heads, max(n, m), n, m, direct=whole)
        lse = torch.zeros(batch, heads, n, dtype=work)
        kernel = KERNELS[kind]
        if whole:
            one = Call(*three, bias=bias, dropout=Dropout(0.5, 1))
            run = partial(kernel.whole_forward, one)
            if backward:
                run = partial(
                    kernel.whole_backward, one, Saved(grad_out, grad_out, lse)
                )
        else:
            task = whole_task(Call(*three, bias=bias))
            state = Statistics(torch.zeros(grad_out.shape, dtype=work), lse - torch.inf)
            run = partial(kernel.forward, task, state)
            if backward:
                sums = [torch.zeros(t.shape, dtype=work) for t in three]
                run = partial(
                    kernel.backward, task, Gradients(grad_out, grad_out, lse, *sums)
                )
        bound = getattr(
            kernel, f"{'backward' if backward else 'forward'}_workspace_bytes"
        )
        assert usage(run).peak <= bound(call, extent), (call, extent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_that_has_no_weight_on_these_keys_adds_nothing(
    dtype: torch.dtype,
) -> None:
    """However large its lse: rounding of that is no reason to take 0 for all of its
    weight."""
    query, key, value, grad_out, out = torch.randn(5, 1, 1, 4, 8, dtype=dtype)
    for lse in (1e3, 1e5, 3e6, 1e9, 1e18):
        saved = Saved(grad_out, out, torch.full((1, 1, 4), lse, dtype=dtype))
        found = TiledKernel(score_tiles.WHOLE_ROWS).whole_backward(
            Call(query, key, value), saved
        )
        assert all(bool((t == 0).all()) for t in found), lse
