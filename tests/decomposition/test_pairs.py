"""What calls and bands keep of blocks of positions, and walks over blocks: against
every pair."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition.bands import Band
from quorum_attention.decomposition.pairs import (
    EMPTY,
    FULL,
    PARTIAL,
    Pairs,
    Ranges,
    Verdict,
    kept_by_both,
    kept_by_either,
    quarters,
    walk,
)

SIDE = st.integers(0, 40)


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    is_causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(-1, 20), st.integers(-1, 20)),
    rows=st.tuples(SIDE, SIDE).filter(lambda r: r[0] < r[1]),
    columns=st.tuples(SIDE, SIDE).filter(lambda r: r[0] < r[1]),
)
def test_verdicts_are_those_of_the_pairs(
    sizes, is_causal, window, rows, columns
) -> None:  # type: ignore[no-untyped-def]
    left, right = (None if side < 0 else side for side in window or (-1, -1))
    verdict = (
        None if window is None else Band(None if left is None else -left, right).verdict
    )
    pairs = Pairs(*sizes, is_causal, verdict)
    q, k = np.arange(*rows)[:, None], np.arange(*columns)[None]
    kept = (q < sizes[0]) & (k < sizes[1])
    kept &= (k <= q) | (not is_causal)
    kept &= True if left is None else q - k <= left
    kept &= True if right is None else k - q <= right
    found = pairs.verdict_of(Ranges.from_bounds(*rows, *columns))
    assert found is PARTIAL or (not kept.any() if found is EMPTY else kept.all())


PATTERNS = {
    EMPTY: [(0, 0, 0)],
    FULL: [(1, 1, 1)],
    PARTIAL: [(0, 1, 1), (1, 0, 0), (0, 0, 1)],
}


def verdict_of(kept: Any) -> Verdict:
    """The right one, as sure as can be."""
    return FULL if np.all(kept) else PARTIAL if np.any(kept) else EMPTY


def test_two_masks_together() -> None:
    """Sure answers are right of every block that could have got them; nothing sure is
    given away that follows from the two verdicts alone."""
    for one, other in itertools.product(Verdict, repeat=2):
        blocks = list(itertools.product(PATTERNS[one], PATTERNS[other]))
        for together, combine in ((kept_by_both, min), (kept_by_either, max)):
            true = {verdict_of(tuple(map(combine, a, b))) for a, b in blocks}
            found = together(one, other)
            assert true == {found} if len(true) == 1 else found is PARTIAL


SIDES = st.integers(1, 40)


@st.composite
def patterns(draw) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Which of some pairs are kept: rectangles, so that there is something to be sure
    of."""
    kept = np.zeros((draw(SIDES), draw(SIDES)), dtype=bool)
    for _ in range(draw(st.integers(0, 4))):
        (a, b), (c, d) = (sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
                          for n in kept.shape)  # fmt: skip
        kept[a:b, c:d] ^= True
    return kept


@settings(max_examples=200, deadline=None)
@given(patterns(), st.sampled_from([1, 3, 8]))
def test_leaves_are_all_there_is_and_their_verdicts_right(kept, unit) -> None:
    def of(block: Ranges) -> np.ndarray:
        return kept[slice(*block.queries), slice(*block.keys)]

    asked: list[Ranges] = []

    def verdict(block: Ranges) -> Verdict:
        asked.append(block)
        return verdict_of(of(block))

    times = np.zeros(kept.shape, dtype=int)
    for block, found in walk(
        Ranges.from_bounds(0, len(kept), 0, kept.shape[1]),
        verdict,
        partial(quarters, unit=unit),
    ):
        assert block == asked[-1], "asked when it is its turn, not before"
        times[slice(*block.queries), slice(*block.keys)] += 1
        assert found is verdict_of(of(block))
        assert found is not PARTIAL or all(
            (b - 1) // unit == a // unit for a, b in block
        )
    assert (times == 1).all(), "every pair in exactly one"
    assert len(asked) == len(set(asked)), "and none asked twice"


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
        verdict = band.verdict(Ranges.from_bounds(q0, q1, k0, k1))
        assert verdict is not FULL or kept.all()
        assert verdict is not EMPTY or not kept.any()
        if low is not None and high is not None and low > high:
            assert verdict is EMPTY, "of a band without a pair nothing is left"
