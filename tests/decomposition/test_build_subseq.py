"""Balanced spans and bits are the paper's BuildSubseq, which works token by token."""

import numpy as np
import pytest
from helpers_decomposition import bits, build_subseq, positions

from quorum_attention.decomposition import Decomposition

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


def test_the_papers_example_of_seven_chunks():
    """N = 49, c = 7: task 4 takes chunks 4, 5 and 0 (of 7 tokens), in ascending order."""
    task = Decomposition(49, (7,), "balanced").task((4,))
    assert [(s.start, s.stop, s.bits == 0) for s in task.spans] == [
        (0, 7, False),
        (28, 35, True),
        (35, 42, False),
    ]
    assert task.spans[0].bits & task.spans[2].bits == 0
