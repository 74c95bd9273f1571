"""Gradients that several blocks contribute to: of a bias, of keys and values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from multiprocessing import resource_sharer

import pytest
import torch

import quorum_attention as qa
from quorum_attention.call.block import Block, WholeCall
from quorum_attention.devices import Pool
from quorum_attention.devices.partition import Buffers, Sums, partition


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[Pool]:
    torch.set_num_threads(1)
    with Pool(["cpu", "cpu"], threads=1) as made:
        yield made
    resource_sharer.stop(timeout=5)  # type: ignore[attr-defined]


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
        torch.testing.assert_close(one, other, atol=3e-5, rtol=3e-5)


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
