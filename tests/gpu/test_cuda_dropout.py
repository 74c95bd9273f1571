"""Dropout on a GPU: within a budget, and where its seeds come from (pairs:
test_cuda_masks.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.attention import assert_close
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SEED = 2**41 + 3


@pytest.mark.parametrize(("budget", "trains"), [("24 MiB", False), ("64 MiB", True)])
def test_a_budget_holds(budget: str, trains: bool) -> None:
    sizes: dict[str, Any] = {"dtype": torch.float16, "device": "cuda"}
    three = [
        torch.randn(1, 8, 16_384, 64, **sizes).requires_grad_(trains) for _ in range(3)
    ]
    call: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": SEED, "is_causal": True}
    report, room = qa.Report(), torch.empty(1, 8, 16_384, 64, **sizes)
    out = qa.attention(*three, **call, budget=budget, out=room, report=report)
    assert report.forward.peak_bytes <= report.forward.budget_bytes
    whole = qa.attention(*(t.detach() for t in three), **call)
    assert_close(out, whole.double(), 4e-3)


def test_seeds_come_from_the_generator_of_the_cpu() -> None:
    """The same as on a CPU; checkpointing draws it again; a graph has to be given
    one."""
    seeds = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(4)
        report = qa.Report()
        three = [
            torch.randn(1, 2, 64, 64, dtype=torch.float32, device="cpu")
            for _ in range(3)
        ]
        torch.manual_seed(4)
        qa.attention(
            *(t.to(device) for t in three), dropout_p=0.5, report=report, devices=device
        )
        seeds.append(report.forward.dropout_seed)
    assert seeds[0] == seeds[1]
    leaves = [
        torch.randn(
            1, 2, 300, 64, dtype=torch.float16, device="cuda", requires_grad=True
        )
        for _ in range(3)
    ]

    def call(*given: torch.Tensor) -> torch.Tensor:
        return qa.attention(*given, dropout_p=0.5)

    found = []
    for again in (False, True):
        torch.manual_seed(6)
        out = checkpoint(call, *leaves, use_reentrant=False) if again else call(*leaves)
        found.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    three = [t.detach() for t in leaves]
    qa.attention(*three, dropout_p=0.5, dropout_seed=1)  # warm-up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = qa.attention(*three, dropout_p=0.5, dropout_seed=1)
    graph.replay()
    assert torch.equal(captured, qa.attention(*three, dropout_p=0.5, dropout_seed=1))
    with (
        pytest.raises(
            NotImplementedError, match="dropout_p in a CUDA graph needs dropout_seed"
        ),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        qa.attention(*three, dropout_p=0.5)
