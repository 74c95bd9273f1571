"""Tokens, spans, runs and segments of a task against dense arrays."""

from __future__ import annotations

import itertools

import numpy as np
from helpers_decomposition import decompositions, positions
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=100, deadline=None)
@given(decompositions(), st.booleans(), st.data())
def test_contiguous_parts_have_the_pairs_of_a_rectangle(shape, is_causal, data) -> None:
    """Each pair in one part, and what is causal still cut at the diagonal of the sequence."""
    path = tuple(data.draw(st.integers(0, c - 1)) for c in shape.levels)
    task = shape.task(path)
    where = positions(task)
    for r in task.rectangles(is_causal):
        times = np.zeros((r.n_queries, r.n_keys), dtype=int)
        for queries, keys, causal in task.contiguous(r):
            top, left = queries.local - r.query_start, keys.local - r.key_start
            rows, columns = slice(top, top + queries.length), slice(left, left + keys.length)
            part = np.ones((queries.length, keys.length), dtype=int)
            times[rows, columns] += np.tril(part) if causal else part
            assert not causal or queries == keys
        q, k = where[r.query_start : r.query_stop], where[r.key_start : r.key_stop]
        expected = q[:, None] >= k[None] if r.causal else np.ones_like(times, dtype=bool)
        np.testing.assert_array_equal(times, expected)


@settings(max_examples=300, deadline=None)
@given(decompositions())
def test_spans_ascend_and_do_not_touch_needlessly(decomposition):
    """Ascending, disjoint, not empty, inside the sequence, and maximal: one span per label run."""
    for task in decomposition.tasks():
        spans = task.spans
        assert all(0 <= s.start < s.stop <= decomposition.n_tokens for s in spans)
        for a, b in itertools.pairwise(spans):
            assert a.stop <= b.start
            assert a.stop < b.start or a.bits != b.bits


@settings(max_examples=300, deadline=None)
@given(decompositions())
def test_no_task_exceeds_the_bound(decomposition):
    """Slots are allocated by max_task_tokens before any task is made."""
    for task in decomposition.tasks():
        assert task.n_tokens == len(positions(task)) <= decomposition.max_task_tokens
    assert decomposition.max_task_tokens <= decomposition.n_tokens
