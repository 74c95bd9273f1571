"""Rows that a mask leaves no key: 0, lse -inf, whatever is in them and in what is masked."""

from __future__ import annotations

import math

import pytest
import torch

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")

N, EMPTY = 24, (5, 11)


def masks() -> dict[str, object]:
    kept = torch.rand(N, N) < 0.6
    kept[list(EMPTY)] = False
    ids = torch.arange(N) // 4
    others = torch.where(torch.isin(torch.arange(N), torch.tensor(EMPTY)), -1, ids)
    return {
        "boolean": kept,
        "additive": torch.randn(N, N).masked_fill_(~kept, -torch.inf),
        "bias": qa.Mask(bias=kept),
        "documents": qa.Mask(documents=(others, ids)),
        "rule": qa.Mask(keeps=lambda b, h, q, k: ((q + k) % 3 == 0) & (q != 5) & (q != 11)),
        "bias and window": qa.Mask(bias=kept, window=6),
        "bias and causal": qa.Mask(bias=kept, causal=True),
    }


@pytest.mark.skipif("cpu" not in qa.kernels(), reason="torch has no such one")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("where", ["key", "value", "query"])
def test_results(depth: int, value: float, where: str) -> None:
    for name, mask in masks().items():
        given = {what: torch.randn(1, 2, N, 8) for what in ("query", "key", "value")}
        given[where][0, 0, 5 if where == "query" else 9, 3] = value
        out, lse = qa.attention_with_lse(
            *given.values(), attn_mask=mask, kernel="cpu", depth=depth
        )  # fmt: skip
        for row in EMPTY:
            assert bool((out[0, :, row] == 0.0).all()), name
            assert bool((lse[0, :, row] == -torch.inf).all()), name
