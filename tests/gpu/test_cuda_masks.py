"""Masks on a GPU: every kernel that runs them, on the device and through slots, against float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_masks import RULES, exact, few_at_a_time, off, random_mask

import quorum_attention as qa
from quorum_attention import Mask, direct
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.fa4 import version

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: (5e-5, 2e-4), torch.float16: (6e-3, 2e-2), torch.bfloat16: (4e-2, 0.1)}


class Drawn:
    """Sizes and dtype of a random call."""

    def __init__(
        self, draw: random.Random, queries: Sequence[int], keys: Sequence[int], dims: Any = (64,)
    ) -> None:
        self.batch, self.kv_heads = draw.choice([1, 2]), draw.choice([1, 2])
        self.heads = self.kv_heads * draw.choice([1, 3])
        self.n_queries = draw.choice(queries)
        self.n_keys = self.n_queries if draw.random() < 0.5 else draw.choice(keys)
        self.dtype, self.dim = draw.choice(list(TOLERANCE)), draw.choice(dims)
        self.of_mask = (self.batch, self.heads, self.n_queries, self.n_keys)
        self.options: dict[str, Any] = {"enable_gqa": True, "scale": 0.125, "devices": "cuda"}
        if draw.random() < 0.5 and max(self.n_queries, self.n_keys) >= 256:
            self.options["depth"] = draw.choice([1, 2])
        print(vars(self))

    def check(
        self, home: str, rules: Mask, given: Mask | None, dropout: Any = None, even: bool = False
    ) -> None:
        """Results and gradients of ``given`` against those of ``rules`` in float64.

        Args:
            even: the gradient is one number, of stride 0.
        """
        heads, kv_heads, n, m = self.heads, self.kv_heads, self.n_queries, self.n_keys
        q, k, v, grad_out = (
            torch.randn(self.batch, h, length, self.dim).to(self.dtype)
            for h, length in ((heads, n), (kv_heads, m), (kv_heads, m), (heads, n))
        )
        if even:
            grad_out = torch.full((), 0.5, dtype=self.dtype).expand(grad_out.shape)
        want = exact(q, k, v, grad_out, rules, 0.125, dropout=dropout)
        learned = [t.to(home).requires_grad_() for t in (q, k, v)]
        out = qa.attention(*learned, given, **self.options)
        with torch.no_grad():
            alone, lse = qa.attention_with_lse(*learned, given, **self.options)
        if given is not None and given.sinks is not None:
            learned.append(given.sinks)
        grads = torch.autograd.grad(out, learned, grad_out.to(home))
        of_results, of_grads = TOLERANCE[self.dtype]
        size = 1.0 if dropout is None else dropout.rescale
        assert max(off(out, want.out), off(alone, want.out)) <= size * of_results
        assert off(lse, want.lse) <= of_results
        for grad, wanted in zip(grads, want.grads, strict=True):
            assert off(grad, wanted) <= size * of_grads


PLAIN = (
    None,
    Mask(causal=True, window=100),
    Mask(causal="lower_right"),
    Mask(window=(40, 7), offset=3),
    Mask(chunk=128, causal=True),
)


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_again_and_again_against_float64(seed: int) -> None:
    """The second and third time they are what they were the first."""
    draw = random.Random(random.random() + seed)
    direct._CACHE.clear()
    drawn = Drawn(draw, [64, 300, 1024], [5, 200, 900], (64, 128, 40))
    mask = draw.choice(PLAIN)
    drawn.options.pop("depth", None)
    rules = mask or Mask()
    if mask is None and drawn.n_queries == drawn.n_keys and draw.random() < 0.7:
        drawn.options["is_causal"], rules = True, Mask(causal=True)
    for time in range(3):
        drawn.check("cuda", rules, mask, even=time == 2)


@pytest.mark.parametrize("home", ["cuda", "cpu"])
@pytest.mark.parametrize("seed", range(24))
def test_random_masks_against_float64(seed: int, home: str) -> None:
    draw = random.Random(random.random() + seed)
    drawn = Drawn(draw, [5, 257, 700, 1500], [3, 128, 900])
    sinks = draw.choice([None, torch.randn(drawn.heads, requires_grad=True)])
    softcap = draw.choice([None, None, 5.0])
    mask = replace(random_mask(draw, *drawn.of_mask), softcap=softcap, sinks=sinks)
    dropout = None
    if seed % 3 == 0:
        dropout = Dropout(draw.choice([0.1, 0.5]), draw.randrange(2**63))
        drawn.options |= {"dropout_p": dropout.p, "dropout_seed": dropout.seed}
    plain = softcap is None and dropout is None
    if plain and drawn.dtype != torch.float32 and draw.random() < 0.4:
        drawn.options["kernel"] = draw.choice(["cudnn", "flash", *(["fa4"] if version() else [])])
    drawn.check(home, mask, mask, dropout)


@pytest.mark.parametrize("home", ["cuda", "cpu"])
@pytest.mark.parametrize("seed", range(8))
def test_rules_that_are_tried_against_float64(
    seed: int, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User's functions and masks of which any may keep a pair, by a table of blocks; with room for
    few blocks, in many launches."""
    draw = random.Random(random.random() + seed)
    drawn = Drawn(draw, [5, 257, 700, 1500], [3, 128, 900])
    rules = random_mask(draw, *drawn.of_mask)
    if seed % 2:
        of_two = tuple(random_mask(draw, *drawn.of_mask, inner=True) for _ in range(2))
        rules = given = replace(rules, either=of_two)
    elif seed % 4:
        rules = given = replace(rules, keeps=draw.choice(RULES))
    else:
        table = torch.rand(drawn.n_keys + 1) < 0.7
        there = table.cuda()
        given = replace(rules, keeps=lambda b, h, q, k: there[k] | (q == k))
        rules = replace(rules, keeps=lambda b, h, q, k: table[k] | (q == k))
    if draw.random() < 0.5:
        few_at_a_time(monkeypatch, draw.choice([1, 3]))
    drawn.check(home, rules, given)


@pytest.mark.parametrize("budget", [None, "256MiB"])
def test_neither_window_nor_rule_takes_a_mask_of_queries_times_keys(budget: str | None) -> None:
    """65,536 tokens: a byte for each pair would be 4 GiB, a bit 512 MiB."""
    n = 65_536
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = Mask(keeps=lambda b, h, q, k: (q * 3 + k * 5) % 7 < 3)
    ids = (torch.arange(n, device="cuda") // 5000)[None]
    window = Mask(causal=True, window=(1023, 0), documents=ids, sinks=torch.zeros(2, device="cuda"))
    qa.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], is_causal=True)  # which starts CUDA
    torch.cuda.reset_peak_memory_stats()
    before, report = torch.cuda.memory_allocated(), qa.Report()
    qa.attention(q, k, v, attn_mask=window, report=report)
    assert report.forward.kernel == "native"
    assert torch.cuda.max_memory_allocated() - before < 8 * q.nbytes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = qa.attention(q, k, v, attn_mask=mask, budget=budget)
    assert torch.cuda.max_memory_allocated() - before < (256 << 20)
    rows = torch.randint(n, (64,), device="cuda")
    scores = (q[:, :, rows].double() @ k.double().mT) / 8
    kept = (rows[:, None] * 3 + torch.arange(n, device="cuda") * 5) % 7 < 3
    want = scores.masked_fill(~kept, -torch.inf).softmax(-1) @ v.double()
    assert off(out[:, :, rows], want.cpu()) <= 4e-2
