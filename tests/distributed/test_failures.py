"""A rank that fails when others count on it raises its error, they raise one, and none is wrong;
what functions of users lose over ranks."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import compare, inputs_of, spawn

import quorum_attention as qa
from quorum_attention import distributed as sharded
from quorum_attention.distributed.run import Sharded
from quorum_attention.kernels.native import NativeKernel

# Heads and key/value heads: exchanged between 2 ranks, and what is shared otherwise.
HEADS = ((4, 4), (5, 1), (3, 3))


class PlantedError(Exception):
    """What a rank fails with here."""


def _call(heads: int, kv_heads: int, **options: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    tensors = inputs_of(heads, kv_heads, 20, 8, 8, torch.float32, 1)
    three = [t.requires_grad_() for t in tensors[:3]]
    return tensors, sharded.attention(*three, is_causal=True, enable_gqa=True, **options)


def _failing(*args: Any) -> Any:
    raise PlantedError("out of everything")


def _passes(out: torch.Tensor | None, heads: int, kv_heads: int, **options: Any) -> None:
    """A forward, or the backward of ``out``."""
    if out is None:
        _call(heads, kv_heads, **options)
    else:
        out.sum().backward(retain_graph=True)


def _one_fails(rank: int) -> None:
    for heads, kv_heads in HEADS:
        for name in ("forward", "backward"):
            for lengths in (None, "equal") if heads == kv_heads else ("equal",):
                group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
                options: dict[str, Any] = {"group": group, "lengths": lengths}
                tensors, out = _call(heads, kv_heads, **options)
                kept = getattr(Sharded, name)
                if rank == 0:
                    setattr(Sharded, name, _failing)
                with pytest.raises(RuntimeError if rank else PlantedError):
                    _passes(out if name == "backward" else None, heads, kv_heads, **options)
                setattr(Sharded, name, kept)
                # What follows is not taken for what is missing.
                for again in (
                    lambda options=options, h=(heads, kv_heads): _call(*h, **options),
                    lambda out=out, tensors=tensors: out.backward(tensors[3]),
                    lambda group=group: sharded.decode(*[torch.ones(1, 1, 1, 8)] * 3, group=group),
                ):
                    with pytest.raises(RuntimeError, match="failed on this rank"):
                        again()
                del out, tensors, options
    # Others of the process can be used.
    torch.manual_seed(1)
    compare(rank, [17, 20], inputs_of(4, 2, 37, 8, 8, torch.float32, 1), True)


def _a_graph_does_not_keep_its_group(rank: int) -> None:
    group = dist.new_group([0, 1], use_local_synchronization=True)
    kept = []
    for heads, kv_heads in HEADS[:2]:
        for backward in (False, True):
            tensors, out = _call(heads, kv_heads, group=group)
            kept.append(out)
            if backward:
                out.backward(tensors[3], retain_graph=True)
    left = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert left() is None, gc.get_referrers(left())
    with pytest.raises(RuntimeError, match="has been destroyed"):
        kept[0].sum().backward()


N = 24


def _named(factor: float) -> Any:
    def function(query: Any, key: Any, value: Any, *, is_causal: bool, scale: float) -> Any:
        scores = factor * scale * (query @ key.mT)
        if is_causal:
            later = torch.ones_like(scores).triu(1).bool()
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    return qa.from_lse_function(function, name="over ranks")


def _three(heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, 2 * N, 8, dtype=torch.float64) for _ in range(3)]
    rows = slice(dist.get_rank() * N, (dist.get_rank() + 1) * N)
    return [t[:, :, rows].clone().requires_grad_() for t in whole]


def _names(rank: int) -> None:
    for heads in (2, 1):
        for causal in (False, True):
            found = []
            for anew in (False, True):
                qa.register_kernel(_named(1.0))
                given = _three(heads)
                out = sharded.attention(*given, is_causal=causal, kernel="over ranks")
                if anew:
                    qa.register_kernel(_named(4.0))
                out.sum().backward()
                found.append([t.grad for t in given])
            for one, other in zip(*found, strict=True):
                assert torch.equal(one, other)  # type: ignore[arg-type]


def _learned(rank: int) -> None:
    slopes = torch.rand(2, requires_grad=True)

    def function(query: Any, key: Any, value: Any, *, is_causal: bool, scale: float) -> Any:
        scores = slopes[0] * scale * (query @ key.mT)
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    for given in (_three(2), [t.detach() for t in _three(2)]):
        with pytest.raises(NotImplementedError, match="no gradient of tensors"):
            sharded.attention(*given, kernel=qa.from_lse_function(function))


def _positions(rank: int) -> None:
    """Parts of a call have positions of their own, so results were of another attention."""
    for kernel in (
        qa.from_score_mod(lambda s, b, h, q, k: s - (q - k).abs(), compiled=False),
        qa.LongNetKernel([(16, 1)]),
        NativeKernel(softcap=5.0),
    ):
        with pytest.raises(NotImplementedError, match="positions in the whole call"):
            sharded.attention(*_three(2), kernel=kernel)


def _all_of_it(rank: int) -> None:
    for check in (_names, _learned, _positions):
        check(rank)
    _a_graph_does_not_keep_its_group(rank)
    _one_fails(rank)


def test_on_processes(tmp_path: Path) -> None:
    spawn(_all_of_it, 2, tmp_path)
