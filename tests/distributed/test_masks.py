"""Sharded calls under masks, with sinks, bias and dropout: what one device gives, in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers_masks import exact, off, random_mask
from helpers_ranks import inputs_of, spawn
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention import distributed as sharded

ALLOWED = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 3e-2}


def _drawn(draw: random.Random, ranks: int) -> tuple[list[int], int, int, torch.dtype]:
    sizes = [draw.choice([0, 1, draw.randint(1, 40)]) for _ in range(ranks)]
    if draw.random() < 0.5:
        sizes = [draw.randint(1, 40)] * ranks
    sizes[0] += 1
    kv_heads = draw.choice([1, 2, ranks])
    dtype = draw.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    return sizes, kv_heads * draw.choice([1, 2, 3]), kv_heads, dtype


def _full(draw: random.Random, batch: int, heads: int, tokens: int) -> Mask:
    mask = random_mask(draw, batch, heads, tokens, tokens)
    if draw.random() < 0.4:
        mask = replace(mask, sinks=torch.randn(heads, dtype=torch.float64).requires_grad_())
    if draw.random() < 0.2:
        mask = replace(mask, softcap=2.0)
    if draw.random() < 0.3:
        shape = draw.choice([(tokens,), (heads, 1, tokens), (batch, 1, tokens, tokens)])
        mask = replace(mask, bias=torch.randn(shape, dtype=torch.float64))
    return mask


def _of_rank(draw: random.Random, mask: Mask, start: int, stop: int) -> Mask:
    """The mask with ids and paddings of a rank's own rows; the same fields on all ranks."""
    if mask.documents is not None and draw.random() < 0.5:
        both = mask.documents
        own = tuple(t[..., start:stop] for t in (both if isinstance(both, tuple) else (both,)))
        mask = replace(mask, documents=own if len(own) == 2 else own[0])
    if mask.key_padding is not None and draw.random() < 0.5:
        mask = replace(mask, key_padding=mask.key_padding[..., start:stop])
    return mask


def _random_masks(rank: int, group: dist.ProcessGroup, count: int) -> None:
    ranks = dist.get_world_size(group)
    for number in range(count):
        draw = random.Random(f"masks {ranks} {number}")
        sizes, heads, kv_heads, dtype = _drawn(draw, ranks)
        tokens, batch = sum(sizes), draw.choice([1, 2])
        if max(sizes) == tokens:  # whose rows a tensor is of cannot be told apart
            sizes[1], tokens = sizes[1] + 3, tokens + 3
        torch.manual_seed(number)
        tensors = inputs_of(heads, kv_heads, tokens, 8, 8, dtype, batch)
        mask = _full(draw, batch, heads, tokens)
        if mask.bias is not None and mask.bias.dim() == 4 and dtype == torch.bfloat16:
            mask = replace(mask, bias=None)
        causal = draw.random() < 0.3
        start, stop = [0, *accumulate(sizes)][rank : rank + 2]
        mine = [t[:, :, start:stop].clone() for t in tensors]
        q, k, v = (t.requires_grad_() for t in mine[:3])
        own = _of_rank(draw, mask, start, stop)
        sinks = bias = None
        if mask.bias is not None and draw.random() < 0.6:
            bias = mask.bias.clone().requires_grad_()
            own, mask = replace(own, bias=bias), replace(mask, bias=bias)
        if mask.sinks is not None:
            sinks = mask.sinks.detach().to(dtype).requires_grad_()
            own = replace(own, sinks=sinks)
            mask = replace(mask, sinks=sinks.double())
        wanted = exact(*tensors, mask, 0.3, is_causal=causal)
        out = sharded.attention(
            q, k, v, own, group=group, scale=0.3, enable_gqa=True, is_causal=causal
        )
        out.backward(mine[3])
        found = [out, *(t.grad for t in (q, k, v))]
        for name, got, true in zip(
            ("out", "query", "key", "value"), found, (wanted.out, *wanted.grads), strict=False
        ):
            if got.numel():
                error = off(got, true[:, :, start:stop])
                assert error <= ALLOWED[dtype], (number, name, error, sizes, own)
        if sinks is not None:
            total = sinks.grad.double()
            dist.all_reduce(total, group=group)
            assert off(total, wanted.grads[3]) <= 3 * ALLOWED[dtype], (number, "sinks")
        if bias is not None:
            total = bias.grad.clone()
            dist.all_reduce(total, group=group)
            assert off(total, wanted.grads[-1]) <= 3 * ALLOWED[dtype], (number, "bias")


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
    _random_masks(rank, everyone, 12)
    _dropout(rank, everyone)
    _biases_learn(rank, everyone)
    if rank < 2:
        _random_masks(rank, pair, 14)
        _dropout(rank, pair)
        _biases_learn(rank, pair)
        _recomputed(rank, pair)
        _under_autocast(rank, pair)
        _refusals(rank, pair)


def test_on_processes(tmp_path: Path) -> None:
    spawn(_all_of_it, 3, tmp_path)
