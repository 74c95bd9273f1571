"""Sharded calls on Gloo processes give what one device gives, whatever ranks, shards and heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import compare, inputs_of, random_calls, spawn

import quorum_attention as qa
from quorum_attention import distributed as sharded
from quorum_attention.distributed import partition


def _all_of_it(rank: int) -> None:
    groups = {n: dist.new_group(list(range(n))) for n in (2, 3, 4)}
    assert not random_calls(500, 8)
    for ranks, group in groups.items():
        if rank < ranks:
            assert not random_calls(1000 * ranks, 16, group)
    _in_turns(rank, groups)
    if rank < 2:
        _several_checks(rank, groups[2])


def test_on_processes(tmp_path: Path) -> None:
    """Groups of 2, 3, 4 and 7 of the same processes, because processes take long to start."""
    spawn(_all_of_it, 7, tmp_path)


def _several_checks(rank: int, group: dist.ProcessGroup) -> None:
    _what_a_rank_computes_is_cut(rank, group)
    _strided_and_without_batch(rank, group)
    _one_rank_alone(rank, group)
    _nothing_recorded(rank, group)
    _no_second_derivative(rank, group)
    _refusals(rank, group)


def _what_a_rank_computes_is_cut(rank: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(1)
    tensors = inputs_of(3, 3, 1400, 16, 16, torch.float32, 1)
    report = compare(rank, [900, 500], tensors, True, depth=1, group=group)
    assert report.imbalance < 1.05
    assert len(report.calls) > 2
    cut = [one.forward for one in report.calls if one.forward is not None and one.forward.levels]
    assert cut, "nothing was cut"
    received = [torch.empty(1) for _ in range(2)]
    dist.all_gather(received, torch.tensor([float(report.forward_bytes)]), group=group)
    assert max(float(r) for r in received) == pytest.approx(report.most_forward_bytes, rel=0.01)


def _strided_and_without_batch(rank: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(2)
    q, k, v, _ = inputs_of(4, 2, 64, 8, 8, torch.float64, 1)
    mine = [t[0, :, 32 * rank : 32 * rank + 32].transpose(0, 1).contiguous() for t in (q, k, v)]
    out = sharded.attention(
        *(t.transpose(0, 1) for t in mine), enable_gqa=True, scale=-0.3, group=group
    )
    whole = qa.attention(q, k, v, enable_gqa=True, scale=-0.3)[0, :, 32 * rank : 32 * rank + 32]
    assert (out - whole).abs().max() < 1e-12


def _one_rank_alone(rank: int, group: dist.ProcessGroup) -> None:
    alone = dist.new_group([rank], use_local_synchronization=True)
    q = torch.randn(1, 2, 40, 8)
    got = sharded.attention(q, q, q, group=alone, is_causal=True)
    assert torch.allclose(got, qa.attention(q, q, q, is_causal=True), atol=1e-6)


def _nothing_recorded(rank: int, group: dist.ProcessGroup) -> None:
    q = torch.randn(1, 2, 40, 8, requires_grad=True)
    with torch.no_grad():
        assert not sharded.attention(q, q, q, group=group).requires_grad


def _no_second_derivative(rank: int, group: dist.ProcessGroup) -> None:
    """It is an error, and no zero, where heads are exchanged whole and where they are not."""
    for heads in (2, 1):
        q = torch.randn(1, heads, 10, 8, requires_grad=True)
        out = sharded.attention(q, q, q, group=group)
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives of quorum_attention"):
            (q.sum() + grad.square().sum()).backward()


def _refusals(rank: int, group: dist.ProcessGroup) -> None:
    """Before anything is sent; autocast is as an argument."""
    q = torch.randn(1, 2, 10, 8)
    for wrong, name in (
        ({"query": q.to(torch.int32)}, "query must be"),
        ({"key": q[:, :, :3]}, "heads and tokens"),
        ({"attn_mask": 3}, "attn_mask"),
        ({"report": 3}, "report"),
        ({"depth": -1}, "depth"),
        ({"kernel": "none such"}, "none such"),
    ):
        named = {"query": q, "key": q, "value": q, "group": group, **wrong}
        with pytest.raises((TypeError, ValueError), match=name):
            sharded.attention(**named)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype"), torch.autocast("cpu", enabled=rank == 0):
        sharded.attention(q, q, q, group=group)
    assert sharded.attention(q, q, q, group=group).shape == q.shape


def _in_turns(rank: int, groups: dict[int, Any]) -> None:
    """Heads that divide by the ranks are exchanged in turns, whole, and nothing is added up."""
    turns_of, partition.turns_of = partition.turns_of, lambda flops: 3
    for sizes in ([5, 12], [7, 0, 4]):
        group = groups[len(sizes)]
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
        _twice_backward(groups[2])
    partition.turns_of = turns_of


def _twice_backward(group: dist.ProcessGroup) -> None:
    q, k, v = (torch.randn(1, 4, 6, 8, requires_grad=True) for _ in range(3))
    out = sharded.attention(q, k, v, group=group, lengths="equal")
    out.sum().backward(retain_graph=True)
    once = q.grad.clone()
    out.sum().backward()
    assert torch.allclose(q.grad, 2 * once)


def test_without_a_group() -> None:
    q = torch.randn(1, 2, 10, 8)
    with pytest.raises(RuntimeError, match="init_process_group"):
        sharded.attention(q, q, q)
