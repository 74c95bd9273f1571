"""Queries that all ranks have, over keys that are sharded: one device's result, on every rank."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers_masks import exact, off
from helpers_ranks import inputs_of, spawn

from quorum_attention import Mask
from quorum_attention import distributed as sharded

ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _steps(rank: int, group: dist.ProcessGroup) -> None:
    ranks = group.size()
    for number in range(25):
        draw = random.Random(f"decoding {ranks} {number}")
        sizes = [draw.choice([0, 1, draw.randint(1, 50)]) for _ in range(ranks)]
        kv_heads, dtype = draw.choice([1, 2, 3]), draw.choice(list(ALLOWED))
        heads, queries, n = kv_heads * draw.choice([1, 4]), draw.choice([1, 1, 3]), sum(sizes)
        torch.manual_seed(number)
        _, k, v, _ = inputs_of(heads, kv_heads, n, 8, 12, dtype, 2)
        q = torch.randn(2, heads, queries, 8, dtype=dtype)
        keep = torch.rand(2, 1, queries, n) < draw.choice([0.2, 0.9, 1.0])
        fields = {"bias": keep}
        if draw.random() < 0.4:
            fields["sinks"] = torch.randn(heads)
        if draw.random() < 0.3:
            fields["softcap"] = 1.5
        rows = slice(*[0, *accumulate(sizes)][rank : rank + 2])
        mine = Mask(**{**fields, "bias": keep[..., rows]})
        report = sharded.ShardedReport()
        got = sharded.decode(
            q,
            k[:, :, rows],
            v[:, :, rows],
            mine,
            group=group,
            scale=0.4,
            enable_gqa=True,
            report=report,
        )
        upstream = torch.zeros(2, heads, queries, 12)
        wanted = exact(q, k, v, upstream, Mask(**fields), 0.4).out if n else torch.zeros(())
        assert got.dtype == dtype
        assert off(got, wanted.expand(got.shape)) <= ALLOWED[dtype], (number, sizes)
        every = [torch.empty_like(got) for _ in sizes]
        dist.all_gather(every, got, group=group)
        assert all(torch.equal(one, got) for one in every)
        element = 8 if dtype == torch.float64 else 4
        numbers = 2 * heads * queries * (12 + 1) + 1
        assert report.forward_bytes == (ranks - 1) * numbers * element


def _ranks_that_are_apart(rank: int, group: dist.ProcessGroup) -> None:
    """Told on all of them, and the group goes on."""
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    first, sinks = rank == 0, Mask(sinks=torch.ones(2))

    def again() -> None:
        torch.manual_seed(0)
        same = torch.randn(1, 2, 1, 8)
        assert sharded.decode(same, k, k, group=group, scale=0.3).isfinite().all()

    for word, others, scale in (
        ("scale", (q, k, k), 0.2),
        ("batch size", [t.repeat(2, 1, 1, 1) for t in (q, k, k)], 0.1),
        ("heads", [t[:, :1] for t in (q, k, k)], 0.1),
        ("value_dim", (q, k, k[..., :4]), 0.1),
        ("dtype", [t.double() for t in (q, k, k)], 0.1),
        ("sinks", (q, k, k, sinks), 0.1),
        ("head_dim", [t.repeat(1, 1, 1, 2) for t in (q, k, k)], 0.1),
    ):
        given = others if first else (q, k, k)
        with pytest.raises(ValueError, match=f"do not agree on .*{word}.*rank {rank} has"):
            sharded.decode(*given, group=group, scale=scale if first else 0.1)
        again()
    for scale in (0.1, 0.2):
        sharded.decode(q, k, k, group=group, scale=scale)
    with pytest.raises(ValueError, match="do not agree on scale"):
        sharded.decode(q, k, k, group=group, scale=0.1 if first else 0.2)
    again()


def _all_of_it(rank: int) -> None:
    pair = dist.new_group([0, 1])
    everyone = dist.group.WORLD
    assert everyone is not None
    _steps(rank, everyone)
    if rank < 2:
        _steps(rank, pair)
        _ranks_that_are_apart(rank, pair)
    _ranks_that_are_apart(rank, everyone)


def test_on_processes(tmp_path: Path) -> None:
    spawn(_all_of_it, 3, tmp_path)


def test_without_a_group() -> None:
    q = torch.randn(1, 2, 1, 8)
    with pytest.raises(RuntimeError, match="init_process_group"):
        sharded.decode(q, q, q)
