"""Calls alike in all but their numbers are not looked at again; others are."""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import TOLERANCES, exact, inputs_of, spawn

import quorum_attention as qa
from quorum_attention import distributed as sharded
from quorum_attention.distributed.peers import Peers

# Of the package's function's name: the module has to be asked for.
attention = import_module("quorum_attention.distributed.attention")
LOOKED: list[bool] = []


def _counting() -> None:
    kept = attention.check_shard

    def counted(*args: Any) -> None:
        LOOKED.append(True)
        kept(*args)

    attention.check_shard = counted


def _right(rank: int, sizes: list[int], lengths: Any, records: bool, **changes: Any) -> None:
    """A call and its backward are what they are in float64."""
    changes = {"heads": 4, "dtype": torch.float32, "causal": True, "apart": False, **changes}
    tensors = inputs_of(changes["heads"], 2, sum(sizes), 16, 16, changes["dtype"], 1)
    start, stop = [0, *accumulate(sizes)][rank : rank + 2]
    q, k, v, upstream = (t[:, :, start:stop].clone() for t in tensors)
    if changes["apart"]:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    for t in (q, k, v):
        t.requires_grad_(records)
    options = {"is_causal": changes["causal"], "enable_gqa": True, "lengths": lengths}
    out = sharded.attention(q, k, v, **options)
    found = [out.detach()]
    if records:
        out.backward(upstream)
        found += [q.grad, k.grad, v.grad]  # type: ignore[list-item]
    else:
        assert not out.requires_grad
    for got, true in zip(found, exact(tensors, changes["causal"]), strict=False):
        top = true.abs().max().clamp_min(1.0)
        error = float(((got.double() - true[:, :, start:stop]).abs() / top).max())
        assert error < 2 * TOLERANCES[changes["dtype"]]


def _alike(rank: int) -> None:
    _counting()
    torch.manual_seed(0)
    sizes: list[int] = [12, 12]
    # How often a call is looked at: when the ranks are asked, when it is remembered; others are as
    # that one. Where its rows lie makes no difference on a CPU.
    every: list[tuple[dict[str, Any], int]] = [
        ({}, 2), ({"records": True}, 2), ({"causal": False}, 2), ({"dtype": torch.float64}, 2),
        ({"apart": True}, 0), ({"heads": 6}, 2), ({"sizes": [10, 14]}, 2),
        ({"lengths": "equal"}, 1),
    ]  # fmt: skip
    for changes, looks in every:
        given: dict[str, Any] = {"records": False, "sizes": sizes, **changes}
        given.setdefault("lengths", given["sizes"])
        LOOKED.clear()
        for _ in range(5):
            _right(rank, **given)
        assert len(LOOKED) == looks, (changes, len(LOOKED))
    # A list that was changed meanwhile is another one.
    for sizes[:] in ([12, 12], [11, 13], [12, 12]):
        _right(rank, sizes, sizes, False)
    _anew(rank)


def _anew(rank: int) -> None:
    """What they depend on beside their tensors."""
    sizes = [12, 12]
    tensors = [
        t[:, :, 12 * rank : 12 * rank + 12] for t in inputs_of(4, 2, 24, 8, 8, torch.float32, 1)
    ]
    options = {"is_causal": True, "enable_gqa": True, "lengths": sizes}

    def looked(**more: Any) -> torch.Tensor:
        LOOKED.clear()
        out = sharded.attention(*tensors[:3], **{**options, **more})
        assert LOOKED
        return out

    for _ in range(3):
        sharded.attention(*tensors[:3], **options)
    looked(report=sharded.ShardedReport())
    looked(budget="1GiB")
    looked(dropout_p=0.5)
    looked(lengths=None)
    with torch.autocast("cpu", torch.bfloat16):
        assert looked().dtype == torch.bfloat16
    with qa.using(kernel="dense"):
        looked()
    # What the ranks have agreed on is forgotten together with what this one has found out.
    peers = Peers.of(dist.group.WORLD)
    assert peers.ready
    for number in range(1025):
        peers.agree(number)
    assert not peers.ready
    looked()
    # A group of which a call is refused is not used any more.
    for wrong, error, words in (
        ({"lengths": [11, 13]}, ValueError, "lengths must have an entry"),
        ({"lengths": [12.0, 12.0]}, TypeError, "lengths"),
        ({"enable_gqa": False}, ValueError, "enable_gqa"),
    ):
        group = dist.new_group([0, 1])
        for _ in range(3):
            sharded.attention(*tensors[:3], **{**options, "group": group})
        with pytest.raises(error, match=words):
            looked(group=group, **wrong)
        dist.barrier()


def test_on_processes(tmp_path: Path) -> None:
    spawn(_alike, 2, tmp_path)
