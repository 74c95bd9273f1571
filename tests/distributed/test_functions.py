"""Functions of users over ranks: what would be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import spawn

import quorum_attention as qa
from quorum_attention import distributed as sharded
from quorum_attention.kernels.native import NativeKernel

N, RANKS = 24, 2


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
    whole = [torch.randn(1, heads, RANKS * N, 8, dtype=torch.float64) for _ in range(3)]
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
    _names(rank)
    _learned(rank)
    _positions(rank)


def test_functions_over_ranks(tmp_path: Path) -> None:
    spawn(_all_of_it, RANKS, tmp_path)
