"""Parts of a call cover it once, in sizes that let devices end together."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quorum_attention.pool.parts import Sizes, parts_of


@pytest.mark.parametrize("seed", range(200))
def test_every_row_of_every_head_is_in_one_part(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, share = draw.randint(1, 5), draw.choice([1, 1, 2, 5])
    n = draw.choice([1, 7, 128, 129, 1000, 5000])
    causal = draw.random() < 0.5
    sizes = Sizes(
        draw.randint(1, 3), kv_heads * share, kv_heads, n, n if causal else draw.randint(1, 900),
        causal, draw.random() < 0.8,
    )  # fmt: skip
    parts = parts_of(sizes, draw.randint(1, 9), even=draw.random() < 0.5)
    seen = np.zeros((sizes.batch, sizes.heads, n), int)
    for part in parts:
        seen[part.entry, slice(*part.heads), slice(*part.rows)] += 1
        kv = part.kv(sizes)
        all_rows = part.rows == (0, n)
        all_heads = part.heads == (kv.start * share, kv.stop * share)
        assert not part.whole or (all_rows and all_heads)
        assert part.n_keys(sizes) >= (part.rows.stop if causal else sizes.n_keys)
    assert (seen == 1).all()
    assert len(set(parts)) == len(parts)


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 32])
@pytest.mark.parametrize("causal", [False, True])
def test_equal_devices_end_together(devices: int, heads: int, causal: bool) -> None:
    """Each takes the next part when it has none: the last ends at most 2 % after an even share."""
    sizes = Sizes(1, heads, heads, 1 << 20, 1 << 20, causal)
    busy = [0] * devices
    for part in parts_of(sizes, devices):
        busy[busy.index(min(busy))] += part.pairs(sizes)
    assert max(busy) * devices / sum(busy) < 1.02


@pytest.mark.parametrize("speeds", [(1.0, 0.5), (1.0, 1.0, 0.5), (1.0, 0.25)])
def test_unequal_devices_end_almost_together(speeds: tuple[float, ...]) -> None:
    sizes = Sizes(1, 8, 8, 1 << 20, 1 << 20, True)
    ends = [0.0] * len(speeds)
    total = 0
    for part in parts_of(sizes, len(speeds), even=False):
        first = ends.index(min(ends))
        ends[first] += part.pairs(sizes) / speeds[first]
        total += part.pairs(sizes)
    assert max(ends) / (total / sum(speeds)) < 1.10


def test_nothing_to_do() -> None:
    assert parts_of(Sizes(0, 2, 2, 10, 10, False), 2) == []
    assert parts_of(Sizes(1, 2, 2, 0, 10, False), 2) == []
