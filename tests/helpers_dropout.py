"""Random tasks with dropout, and what a kernel makes of them."""

from __future__ import annotations

import random

import torch

from quorum_attention.decomposition import Decomposition, Rectangle
from quorum_attention.kernels import Gradients, InnerKernel, Statistics, TaskTensors
from quorum_attention.kernels.dropout import Dropout


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

    dropout = Dropout(r.choice([0.1, 0.5, 0.9]), r.randrange(2**63), 5, 2)
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
        # Of whole rows: only those without any key have -inf.
        Gradients(grad_out.to(dtype), out.to(dtype), torch.full_like(lse, 3.0, dtype=work), *three),
    )


def results(
    kernel: InnerKernel,
    task: TaskTensors,
    given: tuple[Statistics, Gradients],
    device: str = "cpu",
) -> list[torch.Tensor]:
    """out, lse and the three gradients, of copies of what is given, on the CPU."""
    state = Statistics(*(t.to(device, copy=True) for t in (given[0].out, given[0].lse)))
    kernel.forward(task, state)
    read = {name: getattr(given[1], name).to(device) for name in ("grad_out", "out", "lse")}
    names = ("grad_query", "grad_key", "grad_value")
    made = {name: getattr(given[1], name).to(device, copy=True) for name in names}
    kernel.backward(task, Gradients(**read, **made))
    return [t.cpu() for t in (state.out, state.lse, *made.values())]
