"""Dropout tile by tile: as the reference has it, whatever the tiles, within its bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers_attention import GRADIENT_TOLERANCE, TOLERANCE, assert_close
from helpers_memory import usage

from quorum_attention.decomposition import Decomposition, Rectangle
from quorum_attention.kernels import (
    CallShape,
    CpuKernel,
    DenseKernel,
    Extent,
    Gradients,
    InnerKernel,
    MaskShape,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels import dropping as module
from quorum_attention.kernels.dropout import Dropout

pytestmark = pytest.mark.usefixtures("one_thread")


def a_task(r: random.Random, dtype: torch.dtype, most: int) -> TaskTensors:
    """One of the tasks of a random call."""
    n, m = r.randint(1, most), r.randint(1, most)
    batch, shared, key_heads = r.choice([1, 1, 2, 3]), r.choice([1, 2, 3]), r.choice([1, 2, 4])
    width, value_dim = r.randint(1, 9), r.randint(1, 9)
    causal = r.random() < 0.5
    levels = r.choice([(), (3,), (7,), (3, 3)])
    shape = Decomposition(max(n, m), levels, "aligned", r.choice([1, 4, 16]))
    task = r.choice(list(shape.tasks()))
    rows, columns = task.count_below(n), task.count_below(m)
    heads = shared * key_heads

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=torch.float64).to(dtype)

    bias = None
    if r.random() < 0.4:
        sizes = [r.choice([1, size]) for size in (batch, heads, rows, columns)]
        bias = normal(*sizes).masked_fill(torch.rand(sizes) < 0.3, -torch.inf)

    def of(part: Rectangle) -> torch.Tensor | None:
        if bias is None:
            return None
        down = slice(part.query_start, part.query_stop) if bias.shape[2] > 1 else slice(None)
        across = slice(part.key_start, part.key_stop) if bias.shape[3] > 1 else slice(None)
        return bias[:, :, down, across]

    dropout = Dropout(r.choice([0.1, 0.5, 0.9, 1.0]), r.randrange(2**63), 5, 2, r.choice([0, 2]))
    return TaskTensors(
        task, task.rectangles(causal, n, m), normal(batch, heads, rows, width),
        normal(batch, key_heads, columns, width), normal(batch, key_heads, columns, value_dim),
        r.choice([0.4, -0.3, 0.0]), causal, of, dropout=dropout,
    )  # fmt: skip


def states(task: TaskTensors) -> tuple[Statistics, Gradients]:
    work = torch.float64 if task.query.dtype == torch.float64 else torch.float32
    shape = task.query.shape[:3]
    out = torch.randn(*shape, task.value.shape[-1], dtype=torch.float64)
    lse = torch.randn(shape, dtype=torch.float64).masked_fill(torch.rand(shape) < 0.2, -torch.inf)
    out = out.masked_fill(lse.unsqueeze(-1) == -torch.inf, 0.0)
    three = (torch.zeros(t.shape, dtype=work) for t in (task.query, task.key, task.value))
    grad_out = torch.randn(out.shape, dtype=torch.float64)
    dtype = task.query.dtype
    return (
        Statistics(out.to(work), lse.to(work)),
        Gradients(grad_out.to(dtype), out.to(dtype), 3 + lse.to(work), *three),
    )


def results(
    kernel: InnerKernel, task: TaskTensors, given: tuple[Statistics, Gradients]
) -> list[torch.Tensor]:
    state = Statistics(given[0].out.clone(), given[0].lse.clone())
    kernel.forward(task, state)
    three = (t.clone() for t in (given[1].grad_query, given[1].grad_key, given[1].grad_value))
    query, key, value = three
    grads = replace(given[1], grad_query=query, grad_key=key, grad_value=value)
    kernel.backward(task, grads)
    return [state.out, state.lse, query, key, value]


@pytest.mark.parametrize("tile", [None, (200, 16, 7), (60, 5, 3), (1, 1, 1)], ids=str)
def test_random_tasks_by_every_tile(
    tile: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged into states that hold keys already; rows and tiles without keys among them."""
    if tile is not None:
        for name, value in zip(("_PAIRS", "_ROWS", "_KEYS"), tile, strict=True):
            monkeypatch.setattr(module, name, value)
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
