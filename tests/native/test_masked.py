"""The native kernel under a mask: bands of any offset, windows and blocks in one launch."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_masks import RULES, check, few_at_a_time, random_mask

import quorum_attention as qa
from quorum_attention.kernels.dropout import Dropout


@pytest.mark.parametrize("seed", range(9))
def test_random_masks_against_float64(
    seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(random.random() + seed)
    batch, heads = draw.choice([(1, 1), (1, 2), (2, 1)])
    drops, ruled = seed in (3, 4), seed > 4  # dropout takes the interpreter long
    n_queries = draw.choice([5, 40, 70] if drops else [5, 64, 130])
    n_keys = n_queries if draw.random() < 0.5 else draw.choice([3, 66] if drops else [3, 70, 128])
    dtype = draw.choice([torch.float32, torch.float16])
    shapes = ((heads, n_queries), (1, n_keys), (1, n_keys), (heads, n_queries))
    inputs = [torch.randn(batch, h, n, 16).to(dtype) for h, n in shapes]
    sizes = (batch, heads, n_queries, n_keys)
    mask = random_mask(draw, *sizes, inner=True)
    if ruled and seed % 3:
        mask = replace(mask, either=tuple(random_mask(draw, *sizes, inner=True) for _ in "ab"))
    if ruled and seed % 2:
        mask = replace(mask, keeps=draw.choice(RULES))
        few_at_a_time(monkeypatch, draw.choice([1, 2]))
    if not ruled and seed % 4:
        mask = replace(mask, keeps=None)  # rules are tried tile by tile
    if draw.random() < 0.3:
        mask = replace(mask, softcap=5.0, sinks=torch.randn(heads))
    if draw.random() < 0.3:
        mask = replace(mask, bias=torch.randn(n_queries, n_keys).requires_grad_(ruled))
    options: dict[str, Any] = {"kernel": "native", "report": qa.Report()}
    dropout = Dropout(draw.choice([0.1, 0.5]), draw.randrange(2**63)) if drops else None
    if max(n_queries, n_keys) >= (64 if drops else 128):
        options["depth"] = draw.choice([0, 1] if ruled else [0, 1, 2])
    tolerance = 2e-5 if dtype == torch.float32 else 6e-3
    limits = tolerance, 5 * tolerance
    check(inputs, mask, 0.25, limits, dropout=dropout, device=device, **options)
    assert options["report"].forward.kernel == "native"


def test_a_mask_is_one_launch(device: str, launched: list[Any]) -> None:
    q, k, v = (torch.randn(1, 1, 130, 16, device=device) for _ in range(3))
    ids = torch.arange(130) // 30
    mask = qa.Mask(causal="lower_right", window=(40, 0), documents=ids)
    first = qa.attention(q, k, v, attn_mask=mask, kernel="native")  # which tries the kernel once
    launched.clear()
    assert torch.equal(qa.attention(q, k, v, attn_mask=mask, kernel="native"), first)
    assert len(launched) == 1
