"""Invariant 1: every pair is computed exactly once; tasks are those of the paper's BuildSubseq."""

import numpy as np
import pytest
from helpers_decomposition import (
    bits,
    build_subseq,
    decompositions,
    kept_pairs,
    positions,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition


@settings(max_examples=300, deadline=None)
@given(decompositions(200), st.booleans())
@example(Decomposition(49, (7, 7), "balanced"), True)
@example(Decomposition(5, (7,), "balanced"), False)
@example(Decomposition(150, (7, 3, 7), "balanced"), False)
@example(Decomposition(0, (7,)), True)
@example(Decomposition(100, ()), True)
def test_masks_cover_every_pair_once(decomposition, is_causal):
    """No pair is missing and none is counted twice, over all tasks' masks. (That rectangles are
    exactly these masks: test_rectangles.py.)"""
    n = decomposition.n_tokens
    counts = np.zeros((n, n), dtype=int)
    for task in decomposition.tasks():
        where = positions(task)
        counts[np.ix_(where, where)] += kept_pairs(task, is_causal)
    every = np.ones((n, n), dtype=int)
    np.testing.assert_array_equal(counts, np.tril(every) if is_causal else every)


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
