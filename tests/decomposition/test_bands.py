"""Bands along the diagonal: their parts hold each kept pair once."""

from __future__ import annotations

import random

import numpy as np

from quorum_attention.decomposition import EMPTY, FULL, Ranges
from quorum_attention.decomposition.bands import Band


def test_parts_hold_every_kept_pair_of_a_block_once() -> None:
    for _ in range(1500):
        n = random.choice([5, 20, 300])
        q0, k0 = random.randrange(n), random.randrange(n)
        q1, k1 = q0 + random.randrange(1, n), k0 + random.randrange(1, n)
        low, high = (random.choice([None, random.randint(-n, n)]) for _ in range(2))
        band = Band(low, high)
        apart = np.arange(k0, k1)[None] - np.arange(q0, q1)[:, None]
        kept = np.ones_like(apart, dtype=bool)
        kept &= True if low is None else apart >= low
        kept &= True if high is None else apart <= high
        count = np.zeros(apart.shape, dtype=int)
        for part in band.parts(q0, q1, k0, k1):
            assert q0 <= part.query_start < part.query_stop <= q1
            assert k0 <= part.key_start < part.key_stop <= k1
            rows = slice(part.query_start - q0, part.query_stop - q0)
            columns = slice(part.key_start - k0, part.key_stop - k0)
            every = np.ones((part.n_queries, part.n_keys), dtype=int)
            if part.kind in ("lower", "upper"):
                assert part.n_queries == part.n_keys
                every = np.tril(every) if part.kind == "lower" else np.triu(every)
            elif part.kind == "ragged":
                every = kept[rows, columns].astype(int)
            count[rows, columns] += every
        assert np.array_equal(count, kept)
        assert band.count(q0, q1, k0, k1) == kept.sum()
        verdict = band.verdict(Ranges.of(q0, q1, k0, k1))
        assert verdict is not FULL or kept.all()
        assert verdict is not EMPTY or not kept.any()
        if low is not None and high is not None and low > high:
            assert verdict is EMPTY, "of a band without a pair nothing is left"
