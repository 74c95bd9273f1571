"""Blocks of a call cover it once, and each device has as much work as goes by its speed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quorum_attention.call.block import Block, WholeCall
from quorum_attention.devices.partition import Buffers, Sums, is_whole, pairs, partition
from quorum_attention.kernels.dropout import Dropout


@pytest.mark.parametrize("seed", range(200))
def test_every_row_of_every_head_is_in_one_block(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, share = draw.randint(1, 5), draw.choice([1, 1, 2, 5])
    n = draw.choice([1, 7, 128, 129, 1000, 5000])
    causal = draw.random() < 0.5
    call = WholeCall(
        (draw.randint(1, 3),), kv_heads * share, kv_heads, n,
        n if causal else draw.randint(1, 900), is_causal=causal,
        dropout=None if draw.random() < 0.8 else Dropout(0.5, 1),
    )  # fmt: skip
    speeds = [draw.choice([1.0, 1.0, 0.01, 7.0]) for _ in range(draw.randint(1, 9))]
    homes = partition(call, speeds, draw.choice([1, 10]))
    blocks = [block for home in homes for block in home]
    assert len(homes) == len(speeds)
    assert len(set(blocks)) == len(blocks)
    seen = np.zeros((*call.batch_shape, call.heads, n), int)
    for block in blocks:
        seen[block.entries.start, slice(*block.heads), slice(*block.rows)] += 1
        assert block.keys.stop >= (block.rows.stop if causal else call.n_keys)
        assert block.heads.length == 1 or block.rows == (0, n)
        assert is_whole(call, block) or call.key_heads(block).length == 1
    assert (seen == 1).all()
    if call.dropout is None and n == 5000 and min(speeds) == max(speeds):
        work = [sum(pairs(call, one) for one in home) for home in homes]
        assert max(work) - min(work) < 2 * 128 * call.n_keys


def test_nothing_to_do() -> None:
    assert partition(WholeCall((0,), 2, 2, 10, 10), [1.0, 1.0]) == [[], []]
    assert partition(WholeCall((1,), 2, 2, 0, 10), [1.0, 1.0]) == [[], []]


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
