"""Gradients that several blocks contribute to: of a learned bias, of keys and values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from multiprocessing import resource_sharer

import pytest
import torch

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.call.block import Block, WholeCall
from quorum_attention.devices import Pool
from quorum_attention.devices.partition import partition
from quorum_attention.devices.sums import Buffers, Sums

BOUND = {torch.float64: 1e-11, torch.float32: 3e-5, torch.float16: 5e-3}


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[Pool]:
    torch.set_num_threads(1)
    with Pool(["cpu", "cpu"], threads=1) as made:
        yield made
    resource_sharer.stop(timeout=5)  # type: ignore[attr-defined]


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    bound = BOUND[wanted.dtype] * wanted.abs().max().clamp_min(1.0)
    assert (got - wanted).abs().max() <= bound


@pytest.mark.parametrize("seed", range(14))
def test_as_on_one_device(pool: Pool, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch = draw.choice([(1,), (2,), (), (2, 2)])
    kv_heads, share = draw.randint(1, 3), draw.choice([1, 3])
    n, m = draw.choice([1, 65, 300]), draw.choice([1, 200])
    dtype = draw.choice([torch.float64, torch.float64, torch.float32, torch.float16])
    shapes = (kv_heads * share, n, 8), (kv_heads, m, 8), (kv_heads, m, 16)
    three = [torch.randn(*batch, *shape).to(dtype) for shape in shapes]
    full = (*batch, kv_heads * share, n, m)
    shape = tuple(size if draw.random() < 0.6 else 1 for size in full)
    bias = torch.randn(shape[draw.choice([0, len(batch)]) :]).to(dtype)
    kind = draw.choice(["plain", "window", "dropout", "sinks"])
    found = []
    upstream = torch.randn(*batch, kv_heads * share, n, 16).to(dtype)
    for devices in (pool, None):
        leaves = [t.clone().requires_grad_() for t in (*three, bias)]
        mask: torch.Tensor | Mask = leaves[3]
        if kind == "window":
            mask = Mask(bias=leaves[3], window=100)
        elif kind == "sinks":
            mask = Mask(bias=leaves[3], sinks=torch.ones(kv_heads * share).to(dtype))
        dropout = {"dropout_p": 0.3, "dropout_seed": 4} if kind == "dropout" else {}
        out = qa.attention(*leaves[:3], mask, enable_gqa=True, devices=devices, **dropout)  # type: ignore[arg-type]
        out.backward(upstream)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, wanted in zip(*found, strict=True):
        near(got, wanted)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_without_autograd(pool: Pool, heads: int, given: bool) -> None:
    """``grad_mask`` may be a tensor, also one with gaps."""
    q, grad = torch.randn(2, 1, 3, 90, 8)
    bias = torch.randn(heads, 90, 90)
    out, lse = qa.attention_with_lse(q, q, q, bias)
    target = torch.full((90, heads, 90, 2), 9.0)[..., 0].transpose(0, 1)
    wanted = qa.attention_backward(grad, q, q, q, out, lse, bias, grad_mask=True)
    got = qa.attention_backward(
        grad, q, q, q, out, lse, bias, grad_mask=target if given else True, devices=pool
    )
    assert not given or got[3] is target
    for one, other in zip(got, wanted, strict=True):
        near(one, other)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_added_up_in_the_same_way_whatever_comes_first(seed: int) -> None:
    draw = random.Random(seed)
    call = WholeCall((2,), 6, 2, 1000, 1000, is_causal=True)
    key = torch.randn(2, 2, 1000, 4).half()
    homes = partition(call, [1.0] * draw.randint(2, 5), draw.choice([1, 10]))
    made: list[tuple[Block, Buffers]] = []
    for block in (block for home in homes for block in home):
        buffers = Sums(call, key, key).buffers(block)
        if buffers:
            made.append((block, {n: t.copy_(torch.randn(t.shape)) for n, t in buffers.items()}))
    found = []
    for _ in range(3):
        sums, grads = Sums(call, key, key), torch.zeros(2, 2, 2, 1000, 4)
        draw.shuffle(made)
        for one in made:
            sums.add(*one)
        sums.store(*grads)
        found.append(grads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    wanted = torch.zeros(2, 2, 1000, 4, dtype=torch.float64)
    for block, buffers in made:
        rows = wanted[block.entries.start, call.key_heads(block).start]
        rows[: block.keys.length] += buffers["grad_key"][0, 0]
    assert torch.allclose(found[0][0].double(), wanted, atol=1e-5)
