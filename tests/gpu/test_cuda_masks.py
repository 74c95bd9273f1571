"""Masks on a GPU: every kernel that runs them, on the device and through slots, against float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_masks import RULES, exact, off, random_mask

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.fa4 import version
from quorum_attention.kernels.native.blocks import Room

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: (5e-5, 2e-4), torch.float16: (6e-3, 2e-2), torch.bfloat16: (4e-2, 0.1)}


@pytest.mark.parametrize("inputs", ["cuda", "cpu"])
@pytest.mark.parametrize("seed", range(24))
def test_random_masks_against_float64(seed: int, inputs: str) -> None:
    draw = random.Random(random.random() + seed)
    batch, kv_heads = draw.choice([1, 2, 3]), draw.choice([1, 2])
    heads = kv_heads * draw.choice([1, 2])
    n_queries = draw.choice([5, 257, 700, 1500])
    n_keys = n_queries if draw.random() < 0.5 else draw.choice([3, 128, 900])
    dtype = draw.choice(list(TOLERANCE))
    shapes = ((heads, n_queries), (kv_heads, n_keys), (kv_heads, n_keys), (heads, n_queries))
    q, k, v, grad_out = (torch.randn(batch, h, n, 64).to(dtype) for h, n in shapes)
    rules_on_host = random_mask(draw, batch, heads, n_queries, n_keys)
    mask = replace(
        rules_on_host,
        softcap=draw.choice([None, None, 5.0]),
        sinks=draw.choice([None, torch.randn(heads)]),
    )
    options: dict[str, Any] = {"enable_gqa": True, "scale": 0.125, "devices": "cuda"}
    dropout = None
    if seed % 3 == 0:
        dropout = Dropout(draw.choice([0.1, 0.5]), draw.randrange(2**63))
        options |= {"dropout_p": dropout.p, "dropout_seed": dropout.seed}
    want = exact(q, k, v, grad_out, mask, 0.125, dropout=dropout)
    if draw.random() < 0.5 and max(n_queries, n_keys) >= 256:
        options["depth"] = draw.choice([1, 2])
    plain = mask.softcap is None and dropout is None
    if plain and dtype != torch.float32 and draw.random() < 0.4:
        options["kernel"] = draw.choice(["cudnn", "flash", *(["fa4"] if version() else [])])
    tensors = [t.to(inputs).requires_grad_() for t in (q, k, v)]
    placed = replace(mask, sinks=None if mask.sinks is None else mask.sinks.requires_grad_())
    print(options, mask)
    out, lse = qa.attention_with_lse(*tensors, attn_mask=placed, **options)
    learned = tensors if placed.sinks is None else [*tensors, placed.sinks]
    grads = torch.autograd.grad(out, learned, grad_out.to(inputs))
    of_results, of_grads = TOLERANCE[dtype]
    size = 1.0 if dropout is None else dropout.rescale
    assert off(out, want.out) <= size * of_results
    assert off(lse, want.lse) <= of_results
    for grad, wanted in zip(grads, want.grads, strict=True):
        assert off(grad, wanted) <= size * of_grads


def test_a_window_takes_no_more_memory_than_its_tokens() -> None:
    """65,536 tokens: a mask of queries times keys would be 4 GiB of bytes."""
    n = 65_536
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids = (torch.arange(n, device="cuda") // 5000)[None]
    mask = Mask(causal=True, window=(1023, 0), documents=ids, sinks=torch.zeros(2, device="cuda"))
    qa.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], is_causal=True)  # which starts CUDA
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    report = qa.Report()
    qa.attention(q, k, v, attn_mask=mask, report=report)
    assert report.forward is not None
    assert report.forward.kernel == "native"
    assert torch.cuda.max_memory_allocated() - before < 8 * q.nbytes


@pytest.mark.parametrize("inputs", ["cuda", "cpu"])
@pytest.mark.parametrize("seed", range(8))
def test_rules_that_are_tried_against_float64(
    seed: int, inputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User's functions and masks of which any may keep a pair, by a table of blocks; with room for
    few blocks, in many launches."""
    draw = random.Random(random.random() + seed)
    batch, heads = draw.choice([1, 2]), draw.choice([1, 2, 4])
    n_queries = draw.choice([5, 257, 700, 1500])
    n_keys = n_queries if draw.random() < 0.5 else draw.choice([3, 128, 900])
    dtype = draw.choice(list(TOLERANCE))
    shapes = ((heads, n_queries), (1, n_keys), (1, n_keys), (heads, n_queries))
    q, k, v, grad_out = (torch.randn(batch, h, n, 64).to(dtype) for h, n in shapes)
    table = torch.rand(n_keys + 1) < 0.7
    rules_on_host, placed = random_mask(draw, batch, heads, n_queries, n_keys), None
    if seed % 2:
        of_two = tuple(
            random_mask(draw, batch, heads, n_queries, n_keys, inner=True) for _ in range(2)
        )
        rules_on_host = replace(rules_on_host, either=of_two)
    elif seed % 4:
        rules_on_host = replace(rules_on_host, keeps=draw.choice(RULES))
    else:
        there = table.cuda()
        placed = replace(rules_on_host, keeps=lambda b, h, q, k: there[k] | (q == k))
        rules_on_host = replace(rules_on_host, keeps=lambda b, h, q, k: table[k] | (q == k))
    if draw.random() < 0.5:
        few = draw.choice([1, 3])

        def room(nbytes: int, lanes: int, n: int, m: int) -> Room:
            return Room(few * 2048 * lanes, lanes, n, m)

        monkeypatch.setattr(Room, "of", staticmethod(room))
    want = exact(q, k, v, grad_out, rules_on_host, 0.125)
    options: dict[str, Any] = {"enable_gqa": True, "scale": 0.125, "devices": "cuda"}
    if draw.random() < 0.5 and max(n_queries, n_keys) >= 256:
        options["depth"] = draw.choice([1, 2])
    tensors = [t.to(inputs).requires_grad_() for t in (q, k, v)]
    options["attn_mask"] = placed or rules_on_host
    print(options, batch, heads, n_queries, n_keys, dtype)
    out, lse = qa.attention_with_lse(*tensors, **options)
    grads = torch.autograd.grad(out, tensors, grad_out.to(inputs))
    of_results, of_grads = TOLERANCE[dtype]
    assert off(out, want.out) <= of_results
    assert off(lse, want.lse) <= of_results
    for grad, wanted in zip(grads, want.grads, strict=True):
        assert off(grad, wanted) <= of_grads


@pytest.mark.parametrize("budget", [None, "256MiB"])
def test_a_rule_takes_no_mask_of_queries_times_keys(budget: str | None) -> None:
    """65,536 tokens: a byte for each pair would be 4 GiB, a bit 512 MiB."""
    n = 65_536
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = Mask(keeps=lambda b, h, q, k: (q * 3 + k * 5) % 7 < 3)
    qa.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], is_causal=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = qa.attention(q, k, v, attn_mask=mask, budget=budget)
    assert torch.cuda.max_memory_allocated() - before < (256 << 20)
    rows = torch.randint(n, (64,), device="cuda")
    scores = (q[:, :, rows].double() @ k.double().mT) / 8
    kept = (rows[:, None] * 3 + torch.arange(n, device="cuda") * 5) % 7 < 3
    want = scores.masked_fill(~kept, -torch.inf).softmax(-1) @ v.double()
    assert off(out[:, :, rows], want.cpu()) <= 4e-2
