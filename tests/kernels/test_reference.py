"""Dropout tile by tile: as the reference has it, whatever the tiles, within its bytes."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from helpers_attention import GRADIENT_TOLERANCE, TOLERANCE, assert_close
from helpers_dropout import a_task, results, states
from helpers_memory import usage

from quorum_attention.kernels import (
    CallShape,
    CpuKernel,
    DenseKernel,
    Extent,
    MaskShape,
    reference,
)
from quorum_attention.kernels.dropout import Dropout

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("tile", [None, (200, 16, 7), (60, 5, 3), (1, 1, 1)], ids=str)
def test_random_tasks_by_every_tile(
    tile: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged into states that hold keys already; rows and tiles without keys among them."""
    if tile is not None:
        monkeypatch.setattr(reference, "IN_CACHE", reference.TileLimits(*tile))
    r = random.Random(str(tile))
    for _ in range(30 if tile != (1, 1, 1) else 6):
        dtype = r.choice([torch.float16, torch.bfloat16, torch.float32, torch.float64])
        task = a_task(r, dtype, 30 if tile != (1, 1, 1) else 8)
        given = states(task)
        wanted = results(DenseKernel(), task, given)
        found = results(CpuKernel(), task, given)
        assert task.dropout is not None
        size = max(1.0, task.dropout.rescale) * 20
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            limits = GRADIENT_TOLERANCE if number > 1 else TOLERANCE
            work = torch.float64 if dtype == torch.float64 else torch.float32
            assert_close(one, other, limits[work] * size)


@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_bounded(backward: bool) -> None:
    """By tasks of all shapes, thin ones too."""
    r = random.Random(3)
    kernel = CpuKernel()
    for _ in range(16):
        batch, shared, key_heads = r.choice([1, 3]), r.choice([1, 4]), r.choice([1, 5, 30])
        n, m = (r.choice([1, 3, 70, 600, 1500]) for _ in range(2))
        if batch * shared * key_heads * n * m > 4e6:
            continue
        d, dv = r.choice([1, 16, 64]), r.choice([1, 16, 64])
        dtype = r.choice([torch.float16, torch.float32, torch.float64])
        heads = shared * key_heads
        query, key, value, grad_out = (
            torch.zeros(batch, h, rows, width, dtype=dtype)
            for h, rows, width in ((heads, n, d), (key_heads, m, d), (key_heads, m, dv),
                                   (heads, n, dv))
        )  # fmt: skip
        spans = None if r.random() < 0.5 else tuple(r.random() < 0.5 for _ in range(4))
        mask = bias = None
        if spans is not None:
            mask = MaskShape(False, *spans)
            sizes = (batch, heads, n, m)
            bias = torch.zeros([s if yes else 1 for s, yes in zip(sizes, spans, strict=True)],
                               dtype=dtype)  # fmt: skip
        call = CallShape("cpu", dtype, heads, key_heads, d, dv, False, True, mask, dropout=True)
        extent = Extent(batch, heads, key_heads, max(n, m), n, m, direct=True)
        named = {"dropout": Dropout(0.5, 1)}
        if backward:
            lse = torch.zeros(batch, heads, n, dtype=torch.float64 if dtype.itemsize == 8 else
                              torch.float32)  # fmt: skip
            given = (grad_out, query, key, value, grad_out, lse, False, 1.0, bias)
            peak = usage(partial(kernel.whole_backward, *given, **named)).peak
            assert peak <= kernel.backward_workspace_bytes(call, extent), (call, extent)
        else:
            given = (query, key, value, False, 1.0, bias)
            peak = usage(partial(kernel.whole_forward, *given, **named)).peak
            assert peak <= kernel.forward_workspace_bytes(call, extent), (call, extent)
