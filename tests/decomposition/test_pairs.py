"""What a call keeps of a block of positions: never wrong, whatever the block reaches over."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition.pairs import Pairs, Ranges, window_verdict
from quorum_attention.decomposition.verdicts import EMPTY, FULL, PARTIAL

SIDE = st.integers(0, 40)


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    is_causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(-1, 20), st.integers(-1, 20)),
    rows=st.tuples(SIDE, SIDE).filter(lambda r: r[0] < r[1]),
    columns=st.tuples(SIDE, SIDE).filter(lambda r: r[0] < r[1]),
)
def test_verdicts_are_those_of_the_pairs(sizes, is_causal, window, rows, columns) -> None:  # type: ignore[no-untyped-def]
    n_queries, n_keys = sizes
    verdict = None if window is None else window_verdict(*window)
    pairs = Pairs(n_queries, n_keys, is_causal, verdict)

    def kept(q: int, k: int) -> bool:
        if q >= n_queries or k >= n_keys or (is_causal and k > q):
            return False
        left, right = (-1, -1) if window is None else window
        return (left < 0 or q - k <= left) and (right < 0 or k - q <= right)

    found = pairs.of(Ranges.of(*rows, *columns))
    every = [kept(q, k) for q in range(*rows) for k in range(*columns)]
    if found is EMPTY:
        assert not any(every)
    elif found is FULL:
        assert all(every)
    else:
        assert found is PARTIAL


def test_single_pairs_are_decided() -> None:
    pairs = Pairs(20, 20, True, window_verdict(5, 0))
    for q in range(20):
        for k in range(20):
            wanted = FULL if 0 <= q - k <= 5 else EMPTY
            assert pairs.of(Ranges.of(q, q + 1, k, k + 1)) is wanted


@pytest.mark.parametrize(
    ("pairs", "every"),
    [
        (Pairs(9, 9, True), True),
        (Pairs(9, 9, False), True),
        (Pairs(8, 9, False), False),
        (Pairs(9, 9, False, window_verdict(3, 3)), False),
    ],
)
def test_where_every_token_has_a_partner(pairs: Pairs, every: bool) -> None:
    assert pairs.every_token_meets == every
