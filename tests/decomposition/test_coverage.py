"""Invariant 1: every query-key pair is computed exactly once, by mask and by rectangles."""

import numpy as np
from helpers_decomposition import count_rectangles, decompositions, kept_pairs, positions
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition

LIMITS = st.one_of(st.none(), st.integers(1, 40))


def wanted(n: int, is_causal: bool, n_queries: int | None, n_keys: int | None) -> np.ndarray:
    """The pairs of the original attention."""
    where = np.arange(n)
    pairs = np.ones((n, n), dtype=int)
    if is_causal:
        pairs = np.tril(pairs)
    pairs[where >= (n if n_queries is None else n_queries)] = 0
    pairs[:, where >= (n if n_keys is None else n_keys)] = 0
    return pairs


@settings(max_examples=300, deadline=None)
@given(decompositions(200), st.booleans())
@example(Decomposition(49, (7, 7), "balanced"), True)
@example(Decomposition(5, (7,), "balanced"), False)
@example(Decomposition(150, (7, 3, 7), "balanced"), False)
@example(Decomposition(0, (7,)), True)
@example(Decomposition(100, ()), True)
def test_masks_cover_every_pair_once(decomposition, is_causal):
    """No pair is missing and none is counted twice, over all tasks' masks."""
    n = decomposition.n_tokens
    counts = np.zeros((n, n), dtype=int)
    for task in decomposition.tasks():
        where = positions(task)
        counts[np.ix_(where, where)] += kept_pairs(task, is_causal)
    np.testing.assert_array_equal(counts, wanted(n, is_causal, None, None))


@settings(max_examples=300, deadline=None)
@given(
    decompositions(200),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 210)),
    st.one_of(st.none(), st.integers(0, 210)),
    LIMITS,
    LIMITS,
)
@example(Decomposition(49, (7, 7), "balanced"), True, None, None, None, None)
@example(Decomposition(150, (7,)), True, 100, 130, 7, 11)
@example(Decomposition(150, (13,), tile=4), True, 130, 61, None, 9)
@example(Decomposition(150, (3, 3, 3), "balanced"), False, 40, 150, 8, None)
def test_rectangles_cover_every_pair_once(
    decomposition, is_causal, n_queries, n_keys, max_queries, max_keys
):
    """The same for what the kernels are given, with fewer queries or keys and with limits."""
    n = decomposition.n_tokens
    counts = np.zeros((n, n), dtype=int)
    for task in decomposition.tasks():
        rectangles = task.rectangles(is_causal, n_queries, n_keys, max_queries, max_keys)
        where = positions(task)
        counts[np.ix_(where, where)] += count_rectangles(rectangles, task.n_tokens)
    np.testing.assert_array_equal(counts, wanted(n, is_causal, n_queries, n_keys))
