"""How a farm cuts calls: every pair in one unit, whatever the sizes and the number of workers."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from quorum_attention.call.block import WholeCall
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.ray.units import Cut, cut_of


def call_of(batch: int, heads: int, kv_heads: int, n: int, m: int, causal: bool) -> WholeCall:
    return WholeCall((batch,), heads, kv_heads, n, m, is_causal=causal)


def drawn(draw: random.Random) -> WholeCall:
    kv_heads, share = draw.randint(1, 4), draw.randint(1, 3)
    n = draw.choice([1, 2, 100, 999, 5000, 20_011, 70_000, 900_001])
    m = draw.choice([n, n, 1, 250, 4097, 66_000, 800_000])
    return call_of(draw.randint(1, 3), kv_heads * share, kv_heads, n, m, draw.random() < 0.5)


@pytest.mark.parametrize("seed", range(40))
def test_every_pair_of_chunks_is_in_one_task(seed: int) -> None:
    draw = random.Random(seed)
    sizes = drawn(draw)
    cut = Cut(sizes, draw.choice([3, 7, 13, 21, 31]))
    every = range(cut.chunks)
    for a, b in product(every, every):
        if a != b:
            assert len(cut.tasks(a) & cut.tasks(b)) == 1
    for task in every:
        assert set(cut.quorum(task)) == {chunk for chunk in every if task in cut.tasks(chunk)}
        assert task in cut.quorum(task), "the owner's own pairs are its task's"


@pytest.mark.parametrize("seed", range(40))
def test_chunks_lie_side_by_side(seed: int) -> None:
    draw = random.Random(seed)
    sizes = drawn(draw)
    cut = Cut(sizes, draw.choice([1, 7, 13, 31]))
    for rows, n in ((cut.queries, sizes.n_queries), (cut.keys, sizes.n_keys)):
        at = 0
        for chunk in range(cut.chunks):
            assert rows(chunk).start == at
            at = rows(chunk).stop
        assert at == n
    if sizes.is_causal:
        for chunk in range(cut.chunks):
            queries, keys = cut.queries(chunk), cut.keys(chunk)
            assert queries.start == keys.start or not queries.length or not keys.length


def test_large_heads_are_cut_though_there_are_many() -> None:
    sizes = call_of(1, 64, 64, 1 << 24, 1 << 24, True)
    assert cut_of(sizes, 64, 2, 1 << 20, None).chunks == 1
    assert cut_of(sizes, 64, 2, 3 << 31, None).chunks >= 13


def test_what_cannot_be() -> None:
    sizes = call_of(1, 2, 2, 5000, 5000, True)
    with pytest.raises(ValueError, match="8"):
        cut_of(sizes, 2, 2, 1, 8)
    sizes = replace(sizes, dropout=Dropout(0.5, 1))
    with pytest.raises(ValueError, match="dropout_p"):
        cut_of(sizes, 2, 2, 1, 7)
    assert cut_of(sizes, 2, 2, 1, None).chunks == 1
