"""Sharded calls on the GPUs of this machine, with NCCL, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.masks import off
from helpers.ranks import HOME, compare, inputs_of, spawn

from quorum_attention import distributed as sharded
from quorum_attention.distributed import strategies

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
# Heads, key/value heads, rows of the two ranks.
SHAPES = [
    (8, 4, (256, 256), True),
    (8, 8, (300, 77), True),
    (8, 4, (129, 1000), False),
    (5, 1, (700, 301), True),
    (4, 1, (512, 512), True),
    (2, 2, (0, 640), True),
]


def _all_of_it(rank: int) -> None:
    n_head_groups = strategies.n_head_groups
    for n_groups in (1, 2, 3):  # on two streams
        strategies.n_head_groups = lambda *_, n_groups=n_groups: n_groups
        for number, (heads, kv_heads, sizes, causal) in enumerate(SHAPES):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                torch.manual_seed(number)
                tensors = inputs_of(
                    heads, kv_heads, sum(sizes), 64, 64, dtype, 1 + number % 2
                )
                compare(rank, list(sizes), tensors, causal, lengths=sizes)
    strategies.n_head_groups = n_head_groups
    _again_and_again(rank)
    _no_waits()


def _again_and_again(rank: int) -> None:
    """Two streams share memory that is given out again and again: no call reads
    another's."""
    torch.manual_seed(3)
    n = 2048
    tensors = inputs_of(16, 4, 2 * n, 128, 128, torch.bfloat16, 1)
    mine = [t[:, :, n * rank : n * rank + n].clone() for t in tensors]
    wanted: list[torch.Tensor] = []
    for number in range(60):
        q, k, v = (t.clone().requires_grad_() for t in mine[:3])
        with torch.set_grad_enabled(number % 3 != 1):
            out = sharded.attention(
                q, k, v, is_causal=True, enable_gqa=True, lengths="equal"
            )
        # Memory that the call has let go of is written to at once.
        scribbled = [
            torch.full((1 << (18 + size),), torch.nan, device=HOME[0])
            for size in range(6)
        ]
        if out.requires_grad:
            out.backward(mine[3])
        del scribbled
        found = [out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]
        wanted = wanted or [t.cpu() for t in found]
        for got, first in zip(found, wanted, strict=False):
            assert off(got, first) < 1e-2, number


def _no_waits() -> None:
    """A call whose heads divide never has its host wait for a GPU, whatever way it
    goes."""
    tensors = inputs_of(8, 4, 512, 64, 64, torch.bfloat16, 1)
    q, k, v = (t.requires_grad_() for t in tensors[:3])
    for checked in (False, False, True):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if checked else "default")
        try:
            options = {"is_causal": True, "enable_gqa": True, "lengths": "equal"}
            sharded.attention(q, k, v, **options).backward(tensors[3])
            with torch.no_grad():
                sharded.attention(q, k, v, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    dist.barrier()


def test_two_gpus(tmp_path: Path) -> None:
    spawn(_all_of_it, 2, tmp_path, backend="nccl")
