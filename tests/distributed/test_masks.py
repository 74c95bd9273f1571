"""Sharded calls: learned biases, dropout, checkpoints, autocast, and masks that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers_masks import off
from helpers_ranks import inputs_of, spawn
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention import distributed as sharded


def _biases_learn(rank: int, group: dist.ProcessGroup) -> None:
    """Of heads that divide and of heads that do not, the sums over the ranks are the gradient; also
    of a bias that all heads share, with several batch dimensions, with dropout."""
    ranks = dist.get_world_size(group)
    n, rows = 11 * ranks, slice(11 * rank, 11 * rank + 11)
    for heads, kv_heads in ((2 * ranks, ranks), (5, 1), (1, 1)):
        for sizes in ((n, n), (heads, 1, n), (2, 1, heads, n, n), (3, heads, n, n)):
            torch.manual_seed(heads)
            q, upstream = (torch.randn(2, 3, heads, n, 8, dtype=torch.float64) for _ in range(2))
            k, v = (torch.randn(2, 3, kv_heads, n, 8, dtype=torch.float64) for _ in range(2))
            bias = torch.randn(sizes, dtype=torch.float64)
            options = {"is_causal": True, "dropout_p": 0.2, "dropout_seed": 5, "enable_gqa": True}
            found = []
            for call, part in ((qa.attention, slice(n)), (sharded.attention, rows)):
                learns = bias.clone().requires_grad_()
                named = {} if call is qa.attention else {"group": group}
                out = call(*(t[..., part, :] for t in (q, k, v)), learns, **options, **named)
                out.backward(upstream[..., part, :])
                found.append(learns.grad)
            dist.all_reduce(found[1], group=group)
            assert found[1].shape == bias.shape
            assert off(found[1], found[0]) < 1e-11, (heads, sizes)


def _dropout(rank: int, group: dist.ProcessGroup) -> None:
    """The same pairs are dropped as on one device, heads that divide or not."""
    ranks = dist.get_world_size(group)
    for heads, kv_heads, mask in (
        (2 * ranks, ranks, None),
        (5, 1, None),
        (1, 1, None),
        (2 * ranks, 2 * ranks, Mask(window=(7, 0), sinks=torch.randn(2 * ranks))),
        (5, 5, Mask(causal=True)),
        (5, 1, Mask(causal=True, offset=4)),
        (1, 1, Mask(causal="lower_right", offset=-3)),
    ):
        torch.manual_seed(heads)
        tensors = inputs_of(heads, kv_heads, 20 * ranks, 8, 8, torch.float64, 2)
        if mask is not None and mask.sinks is not None:
            mask = replace(mask, sinks=torch.linspace(-1, 1, heads, dtype=torch.float64))
        moved = mask is not None and mask.offset is not None
        options = {
            "dropout_p": 0.4, "dropout_seed": 11, "enable_gqa": True, "is_causal": not moved,
        }  # fmt: skip
        one = [t.clone().requires_grad_() for t in tensors[:3]]
        whole = qa.attention(*one, mask, **options)
        whole.backward(tensors[3])
        rows = slice(20 * rank, 20 * rank + 20)
        mine = [t[:, :, rows].clone().requires_grad_() for t in tensors[:3]]
        out = sharded.attention(*mine, mask, group=group, **options)
        out.backward(tensors[3][:, :, rows])
        for got, true in zip((out, *mine), (whole, *one), strict=True):
            got, true = (got, true) if got is out else (got.grad, true.grad)
            assert off(got, true[:, :, rows]) < 1e-11
    q, k, v = (torch.randn(1, ranks, 8, 8, requires_grad=True) for _ in range(3))
    out = sharded.attention(q, k, v, dropout_p=0.5, group=group)
    out.sum().backward()
    assert not torch.equal(out, sharded.attention(q, k, v, dropout_p=0.5, group=group))


def _recomputed(rank: int, group: dist.ProcessGroup) -> None:
    """Under a checkpoint all ranks recompute, also those that had nothing to compute."""
    q, upstream = (torch.randn(1, 1, 6, 8, dtype=torch.float64) for _ in range(2))
    for reentrant in (False, True):
        grads = []
        for checkpointed in (False, True):
            x = q.clone().requires_grad_()

            def call(x: torch.Tensor) -> torch.Tensor:
                return sharded.attention(x, x, x, group=group, dropout_p=0.3, dropout_seed=2)

            out = checkpoint(call, x, use_reentrant=reentrant) if checkpointed else call(x)
            out.backward(upstream)
            grads.append(x.grad)
        assert torch.equal(*grads)


def _under_autocast(rank: int, group: dist.ProcessGroup) -> None:
    q, k, v = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sharded.attention(q, k, v, group=group)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def _refusals(rank: int, group: dist.ProcessGroup) -> None:
    """All ranks raise, before anything is sent."""
    q = torch.randn(1, 2, 10, 8)
    n = 10 * dist.get_world_size(group)
    with pytest.raises(ValueError, match="documents"):
        sharded.attention(q, q, q, Mask(documents=torch.zeros(7, dtype=torch.int64)), group=group)
    with pytest.raises(ValueError, match=r"attn_mask.*broadcast"):
        sharded.attention(q, q, q, torch.zeros(10, 10), group=group)
    with pytest.raises(ValueError, match="sinks"):
        sharded.attention(q, q, q, Mask(sinks=torch.zeros(3)), group=group)
    documents = torch.zeros(n, dtype=torch.int64)
    k = q.clone().requires_grad_()
    out = sharded.attention(k, k, k, Mask(documents=documents), group=group)
    documents[3] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


def _all_of_it(rank: int) -> None:
    pair = dist.new_group([0, 1])
    everyone = dist.group.WORLD
    assert everyone is not None
    _dropout(rank, everyone)
    _biases_learn(rank, everyone)
    if rank < 2:
        _dropout(rank, pair)
        _biases_learn(rank, pair)
        _recomputed(rank, pair)
        _under_autocast(rank, pair)
        _refusals(rank, pair)


def test_on_processes(tmp_path: Path) -> None:
    spawn(_all_of_it, 3, tmp_path)
