"""Dropout in Triton: the pairs of ``kernels/dropout.py``, wherever they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quorum_attention.decomposition import Rectangle, Span, Task
from quorum_attention.kernels import Statistics, TaskTensors
from quorum_attention.kernels.dropout import Dropout, dropped
from quorum_attention.kernels.native import NativeKernel

KERNEL = NativeKernel()
SEED = 2**62 + 2**31 + 5  # words are passed as signed numbers of 32 bits


def weights(task: Task, rectangles: tuple[Rectangle, ...], dropout: Dropout, device: str) -> Any:
    """Which pairs of a task are kept: all weigh the same, values are columns of the identity."""
    n = task.n_tokens
    zeros = torch.zeros(2, 2, n, 4, device=device)
    value = torch.eye(n, device=device).expand(2, 1, n, n)
    tensors = TaskTensors(
        task, rectangles, zeros, zeros[:, :1], value, 1.0, False, lambda r: None, dropout=dropout
    )
    out = torch.zeros(2, 2, n, n, device=device)
    lse = torch.full((2, 2, n), -torch.inf, device=device)
    KERNEL.forward(tensors, Statistics(out, lse))
    return out.cpu() != 0


@pytest.mark.parametrize(
    ("starts", "way"),
    [((0, 40), 2), ((10**9, 2 * 10**9), 2), ((3, 50), 1), ((2**31 - 60, 2**31 - 33), 1)],
)
def test_the_pairs_are_those_of_the_definition(
    device: str, launched: list[Any], starts: tuple[int, int], way: int
) -> None:
    """At any position: of runs that begin at a multiple of four, and of others."""
    spans = tuple(Span(start, start + 16, 0) for start in starts)
    task = Task((), spans)
    dropout = Dropout(0.37, SEED, 6, 1)
    found = weights(task, (Rectangle(0, 32, 0, 32),), dropout, device)
    rows = torch.cat([torch.arange(start, start + 16) for start in starts])
    wanted = ~dropped(dropout, 2, 2, rows, task.segments(0, 32))
    assert torch.equal(found, wanted)
    assert {constants.DROPOUT for _, constants in launched} == {way}
