"""Invariant 1: every pair is computed exactly once; tasks are those of the paper's BuildSubseq."""

import numpy as np
import pytest
from helpers_decomposition import (
    bits,
    build_subseq,
    count_rectangles,
    decompositions,
    kept_pairs,
    positions,
)
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


CASES = [
    (49, (7,)), (49, (7, 7)), (50, (7, 7)), (130, (7, 7)), (5, (7, 7)), (400, (7, 7)),
    (100, (13,)), (97, (3, 7)), (97, (13, 3)), (60, (3, 3, 3)), (211, (21,)), (91, (1, 7)),
]  # fmt: skip


@pytest.mark.parametrize(("n_tokens", "levels"), CASES)
def test_spans_and_bits_equal_the_papers_algorithm(n_tokens, levels):
    """Same tokens in the same order; two tokens share a bit where they share a non-owner chunk."""
    decomposition = Decomposition(n_tokens, levels, "balanced")
    for task in decomposition.tasks():
        token_ids, groups = build_subseq(n_tokens, levels, task.path)
        np.testing.assert_array_equal(positions(task), np.array(token_ids, dtype=int))
        assert [own.bit_count() for own in bits(task)] == [len(group) for group in groups]
        kept = [[not (a & b) for b in groups] for a in groups]
        expected = np.array(kept, dtype=bool).reshape(len(groups), len(groups))
        np.testing.assert_array_equal(task.mask(), expected)
