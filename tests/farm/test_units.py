"""How a farm cuts calls: every pair in one unit, whatever the sizes and the number of workers."""

from __future__ import annotations

import random
from itertools import product

import pytest

from quorum_attention.devices.partition import Sizes
from quorum_attention.farm.units import Cut, cut_of, units_of


def drawn(draw: random.Random) -> Sizes:
    kv_heads, share = draw.randint(1, 4), draw.randint(1, 3)
    n = draw.choice([1, 2, 100, 999, 5000, 20_011, 70_000, 900_001])
    m = draw.choice([n, n, 1, 250, 4097, 66_000, 800_000])
    return Sizes(draw.randint(1, 3), kv_heads * share, kv_heads, n, m, draw.random() < 0.5)


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


@pytest.mark.parametrize("n", [1 << 24, 1_000_003, 57 * 8192])
def test_long_chunks_have_few_lengths(n: int) -> None:
    """A kernel prepares each shape."""
    cut = Cut(Sizes(1, 1, 1, n, n, True), 57)
    lengths = [cut.keys(chunk).length for chunk in range(57)]
    assert len(set(lengths[:-1])) == 1
    assert 0.5 * lengths[0] < lengths[-1] <= lengths[0]


@pytest.mark.parametrize("seed", range(60))
def test_every_worker_has_something_to_do(seed: int) -> None:
    draw = random.Random(seed)
    sizes = drawn(draw)
    workers = draw.randint(1, 40)
    cut = cut_of(sizes, workers, 1000)
    units = units_of(cut)
    assert len(units) == sizes.batch * sizes.kv_heads * cut.chunks == len(set(units))
    shortest = min(sizes.n_queries, sizes.n_keys)
    if shortest >= 183 * 256:
        assert len(units) >= min(10 * workers, 183 * sizes.batch * sizes.kv_heads)
    assert cut.chunks == 1 or shortest >= 256 * cut.chunks
    pairs = sum(unit.pairs(cut) for unit in units)
    n, m = sizes.n_queries, sizes.n_keys
    whole = (n * (n + 1) // 2 if sizes.is_causal else n * m) * sizes.heads * sizes.batch
    assert whole - len(units) <= pairs <= whole + len(units)


def test_large_heads_are_cut_though_there_are_many() -> None:
    sizes = Sizes(1, 64, 64, 1 << 24, 1 << 24, True)
    assert cut_of(sizes, 2, 1 << 20).chunks == 1
    assert cut_of(sizes, 2, 3 << 31).chunks >= 13


def test_what_cannot_be() -> None:
    sizes = Sizes(1, 2, 2, 5000, 5000, True)
    with pytest.raises(ValueError, match="8"):
        cut_of(sizes, 2, 1, chunks=8)
    with pytest.raises(ValueError, match="dropout_p"):
        cut_of(sizes, 2, 1, chunks=7, may_cut=False)
    assert cut_of(sizes, 2, 1, may_cut=False).chunks == 1
