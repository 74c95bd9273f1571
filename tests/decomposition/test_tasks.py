"""Where the tokens of a task and of its rectangles lie in the whole sequence."""

from __future__ import annotations

import itertools

import numpy as np
from helpers_decomposition import decompositions, positions
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Rows
from quorum_attention.decomposition.tasks import tokens_of


def spelled_out(rows: Rows) -> list[tuple[int, int]]:
    return [(rows.start + i, rows.local + i) for i in range(rows.length)]


@settings(max_examples=150, deadline=None)
@given(decompositions(), st.data())
def test_segments_are_the_tokens_of_a_local_range(shape, data) -> None:
    """As few as there can be: no two go on with each other."""
    path = tuple(data.draw(st.integers(0, c - 1)) for c in shape.levels)
    task = shape.task(path)
    start, stop = (data.draw(st.integers(0, task.n_tokens)) for _ in range(2))
    found = task.segments(start, stop)
    where = positions(task).tolist()
    assert [at for rows in found for at in spelled_out(rows)] == [
        (where[local], local) for local in range(start, stop)
    ]
    assert all(a.continued(b) is None for a, b in itertools.pairwise(found))
    assert tuple(task.segments(0, task.n_tokens)) == task.runs


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


@settings(max_examples=60, deadline=None)
@given(decompositions(), st.integers(1, 5))
def test_tokens_of_several_tasks(shape, step) -> None:
    tasks = list(shape.tasks())[::step]
    found = tokens_of(*tasks)
    every = sorted({p for task in tasks for p in positions(task).tolist()})
    assert [p for start, stop in found for p in range(start, stop)] == every
    assert all(a.stop < b.start for a, b in itertools.pairwise(found))
