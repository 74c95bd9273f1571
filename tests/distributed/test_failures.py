"""A rank that fails when others count on it: it raises its error, they raise one, none is wrong."""

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

from quorum_attention import distributed as sharded
from quorum_attention.distributed.run import Sharded

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


def _all_of_it(rank: int) -> None:
    _a_graph_does_not_keep_its_group(rank)
    _one_fails(rank)


def test_on_processes(tmp_path: Path) -> None:
    spawn(_all_of_it, 2, tmp_path)
