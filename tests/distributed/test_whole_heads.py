"""Heads that divide by the ranks are exchanged in turns, whole, and nothing is added up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import compare, inputs_of, spawn

from quorum_attention import distributed as sharded
from quorum_attention.distributed import heads as whole_heads
from quorum_attention.distributed.heads import Swap, opened


@pytest.mark.parametrize(("kv_heads", "shared"), [(1, 8), (2, 1), (3, 4), (4, 8), (9, 2), (32, 1)])
@pytest.mark.parametrize("turns", [1, 3])
def test_turns_have_every_head_once(
    kv_heads: int, shared: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_heads, "_TURNS", turns)
    made = whole_heads.turns_of(kv_heads, shared)
    assert [h for t in made for h in range(*t.heads)] == list(range(kv_heads * shared))
    assert [h for t in made for h in range(*t.kv_heads)] == list(range(kv_heads))
    assert len(made) == min(turns, kv_heads)


def test_turns_on_two_streams_are_for_long_calls() -> None:
    assert len(whole_heads.turns_of(4, 8, 1e9)) == 1
    assert len(whole_heads.turns_of(4, 8, 2e12)) == 2
    assert len(whole_heads.turns_of(1, 8, 2e12)) == 1


def _in_turns(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.group.WORLD]
    whole_heads._TURNS = 3
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
    _rows_as_they_were(rank)
    if rank < 2:
        _twice_backward(rank, pairs[0])


def _rows_as_they_were(rank: int) -> None:
    """There and back again, of tensors that are not contiguous."""
    lengths = [3, 2, 4]
    swap = Swap(dist.group.WORLD, lengths)
    torch.manual_seed(7)
    whole = torch.randn(2, 9, 6, 5).transpose(1, 2)
    mine = whole[:, :, swap.start : swap.start + swap.rows]
    (came,) = swap.to_heads([(mine, (0, 2))]).arrived()
    assert torch.equal(came, whole[:, 2 * rank : 2 * rank + 2])
    back = torch.full((2, 6, swap.rows, 5), torch.nan)
    swap.to_rows(came, back, 0).written()
    assert torch.equal(back, mine)
    first, second = opened(torch.arange(24).view(2, 2, 6), [(2, 2), (1, 2)])
    assert first[1, 1, 0].tolist() == [8, 9]
    assert second[0, 0, 1].tolist() == [16, 17]


def _twice_backward(rank: int, group: dist.ProcessGroup) -> None:
    q, k, v = (torch.randn(1, 4, 6, 8, requires_grad=True) for _ in range(3))
    out = sharded.attention(q, k, v, group=group, lengths="equal")
    out.sum().backward(retain_graph=True)
    once = q.grad.clone()
    out.sum().backward()
    assert torch.allclose(q.grad, 2 * once)


def test_on_processes(tmp_path: Path) -> None:
    spawn(_in_turns, 3, tmp_path)
