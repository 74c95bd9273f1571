"""Heads that divide by the ranks are exchanged in turns, whole, and nothing is added up."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from helpers_ranks import compare, inputs_of, spawn

from quorum_attention import distributed as sharded


def _in_turns(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.group.WORLD]
    import_module("quorum_attention.distributed.partition").turns_of = lambda flops: 3
    for group, sizes in zip(pairs, ([5, 12], [7, 0, 4]), strict=True):
        if rank >= len(sizes):
            continue
        for number, dtype in enumerate((torch.float64, torch.bfloat16)):
            ranks = len(sizes)
            torch.manual_seed(number)
            tensors = inputs_of(8 * ranks, 4 * ranks, sum(sizes), 16, 8, dtype, 2)
            report = compare(rank, sizes, tensors, number == 0, group=group, lengths=sizes)
            assert (report.way, report.stages, report.kept) == ("heads exchanged", 3, True)
            assert len(report.calls) == 6
            element = 8 if dtype == torch.float64 else 4  # calls this small are widened
            if rank == sizes.index(max(sizes)):
                continue
            foreign, own = sum(sizes) - sizes[rank], sizes[rank] * (ranks - 1)
            inward, back = 8 * 16 + 4 * 16 + 4 * 8, 8 * 8
            assert report.forward_bytes == 2 * element * (foreign * inward + own * back)
            inward, back = 8 * 8, inward
            assert report.backward_bytes == 2 * element * (foreign * inward + own * back)
    if rank < 2:
        _twice_backward(rank, pairs[0])


def _twice_backward(rank: int, group: dist.ProcessGroup) -> None:
    q, k, v = (torch.randn(1, 4, 6, 8, requires_grad=True) for _ in range(3))
    out = sharded.attention(q, k, v, group=group, lengths="equal")
    out.sum().backward(retain_graph=True)
    once = q.grad.clone()
    out.sum().backward()
    assert torch.allclose(q.grad, 2 * once)


def test_on_processes(tmp_path: Path) -> None:
    spawn(_in_turns, 3, tmp_path)
