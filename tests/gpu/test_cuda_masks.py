"""Masks on a GPU: every kernel that runs them, on the device and through slots, against
float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.masks import RULES, check, few_at_a_time, off, random_mask

import quorum_attention as qa
from quorum_attention import Mask, dispatch
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.fa4 import version

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {
    torch.float32: (5e-5, 2e-4),
    torch.float16: (6e-3, 2e-2),
    torch.bfloat16: (4e-2, 0.1),
}


class Drawn:
    """A random call without its mask."""

    def __init__(
        self,
        draw: random.Random,
        queries: Sequence[int],
        keys: Sequence[int],
        dims: Any = (64,),
    ) -> None:
        batch, kv_heads = draw.choice([1, 2]), draw.choice([1, 2])
        heads, n = kv_heads * draw.choice([1, 3]), draw.choice(queries)
        m = n if draw.random() < 0.5 else draw.choice(keys)
        self.dtype, dim = draw.choice(list(TOLERANCE)), draw.choice(dims)
        self.of_mask = (batch, heads, n, m)
        shapes = (heads, n), (kv_heads, m), (kv_heads, m), (heads, n)
        self.inputs = [
            torch.randn(batch, *shape, dim).to(self.dtype) for shape in shapes
        ]
        self.options: dict[str, Any] = {"devices": "cuda"}
        if draw.random() < 0.5 and max(n, m) >= 256:
            self.options["depth"] = draw.choice([1, 2])

    def check(self, home: str, rules: Mask, **more: Any) -> None:
        """Results and gradients against those of ``rules`` in float64."""
        limits = TOLERANCE[self.dtype]
        check(
            self.inputs,
            rules,
            0.125,
            limits,
            device=home,
            alone=True,
            **self.options,
            **more,
        )


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
    dispatch._CACHE.clear()
    drawn = Drawn(draw, [64, 300, 1024], [5, 200, 900], (64, 128, 40))
    mask = draw.choice(PLAIN)
    drawn.options.pop("depth", None)
    rules, (_, _, n, m) = mask or Mask(), drawn.of_mask
    if mask is None and n == m and draw.random() < 0.7:
        drawn.options["is_causal"] = True
    for time in range(3):
        if time == 2:  # one number, of stride 0
            half = torch.full((), 0.5, dtype=drawn.dtype)
            drawn.inputs[3] = half.expand(drawn.inputs[3].shape)
        drawn.check("cuda", rules, given=mask)


@pytest.mark.parametrize("home", ["cuda", "cpu"])
@pytest.mark.parametrize("seed", range(32))
def test_random_masks_against_float64(
    seed: int, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every fourth, users' functions and masks of which any may keep a pair: by a
    table of blocks, with room for few of them, in many launches."""
    draw = random.Random(random.random() + seed)
    drawn, more = Drawn(draw, [5, 257, 700, 1500], [3, 128, 900]), dict[str, Any]()
    mask = random_mask(draw, *drawn.of_mask)
    if seed % 4 == 0:
        if seed % 3 == 0:
            of_two = tuple(
                random_mask(draw, *drawn.of_mask, inner=True) for _ in range(2)
            )
            mask = replace(mask, either=of_two)
        elif seed % 3 == 1:
            mask = replace(mask, keeps=draw.choice(RULES))
        else:
            table = torch.rand(drawn.of_mask[3] + 1) < 0.7
            there = table.cuda()
            more["given"] = replace(mask, keeps=lambda b, h, q, k: there[k] | (q == k))
            mask = replace(mask, keeps=lambda b, h, q, k: table[k] | (q == k))
        if draw.random() < 0.5:
            few_at_a_time(monkeypatch, draw.choice([1, 3]))
    else:
        sinks = draw.choice([None, torch.randn(drawn.of_mask[1], requires_grad=True)])
        mask = replace(mask, softcap=draw.choice([None, None, 5.0]), sinks=sinks)
        if seed % 3 == 0:
            more["dropout"] = Dropout(draw.choice([0.1, 0.5]), draw.randrange(2**63))
        plain = mask.softcap is None and not more
        if plain and drawn.dtype != torch.float32 and draw.random() < 0.4:
            names = ["cudnn", "flash", *(["fa4"] if version() else [])]
            drawn.options["kernel"] = draw.choice(names)
    drawn.check(home, mask, **more)


@pytest.mark.parametrize("budget", [None, "256MiB"])
def test_neither_window_nor_rule_takes_a_mask_of_queries_times_keys(
    budget: str | None,
) -> None:
    """65,536 tokens: a byte for each pair would be 4 GiB, a bit 512 MiB."""
    n = 65_536
    q, k, v = (
        torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    mask = Mask(keeps=lambda b, h, q, k: (q * 3 + k * 5) % 7 < 3)
    ids = (torch.arange(n, device="cuda") // 5000)[None]
    window = Mask(
        causal=True,
        window=(1023, 0),
        documents=ids,
        sinks=torch.zeros(2, device="cuda"),
    )
    qa.attention(
        q[:, :, :256], k[:, :, :256], v[:, :, :256], is_causal=True
    )  # which starts CUDA
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


def test_a_long_window_is_remembered_and_a_second_derivative_is_refused() -> None:
    dispatch._CACHE.clear()
    q, k, v = (
        torch.randn(1, 8, 40_000, 64, device="cuda").bfloat16() for _ in range(3)
    )
    q.requires_grad_()
    mask = qa.Mask(causal=True, window=512)
    first = qa.attention(q, k, v, mask)
    assert [len(request.decisions or ()) for request in dispatch._CACHE.values()] == [1]
    second = qa.attention(q, k, v, mask)
    assert torch.equal(first, second)
    assert type(second.grad_fn).__name__ == "AttentionBackward"
    (grad,) = torch.autograd.grad(second.float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(grad.float().sum(), q)
