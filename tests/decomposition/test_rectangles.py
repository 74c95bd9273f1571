"""Rectangles of a task: a partition of exactly its mask, few, large, of few shapes; and batches."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_decomposition import count_rectangles, decompositions, kept_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition
from quorum_attention.decomposition.rectangles import batches
from quorum_attention.quorums import quorum_size

LIMITS = st.one_of(st.none(), st.integers(1, 200))


@settings(max_examples=200, deadline=None)
@given(
    decompositions(300),
    st.data(),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 300)),
    st.one_of(st.none(), st.integers(0, 300)),
    LIMITS,
    LIMITS,
)
def test_rectangles_partition_the_masks_kept_pairs(
    decomposition, data, is_causal, n_queries, n_keys, max_queries, max_keys
):
    """Each task by itself: nothing masked is computed, nothing kept is left out or repeated."""
    path = tuple(data.draw(st.integers(0, c - 1)) for c in decomposition.levels)
    task = decomposition.task(path)
    rectangles = task.rectangles(is_causal, n_queries, n_keys, max_queries, max_keys)
    counts = count_rectangles(rectangles, task.n_tokens)
    np.testing.assert_array_equal(counts, kept_pairs(task, is_causal, n_queries, n_keys))
    assert is_causal or not any(r.causal for r in rectangles)
    for r in rectangles:
        assert max_queries is None or r.n_queries <= max_queries
        assert max_keys is None or r.n_keys <= max_keys


@pytest.mark.parametrize("c", [7, 13, 31, 57])
@pytest.mark.parametrize("layout", ["aligned", "balanced"])
def test_depth_one_causal_takes_l_calls(c, layout):
    """l - 1 plain calls and one causal square: the fewest launches and merges."""
    decomposition = Decomposition(10_000_000, (c,), layout)
    l = quorum_size(c)
    for task in decomposition.tasks():
        squares = [r for r in task.rectangles(True) if r.causal]
        assert len(task.rectangles(True)) == l
        assert len(squares) == 1
        owned = next(s for s in task.spans if s.bits == 0)
        assert squares[0].n_queries == owned.stop - owned.start


@given(
    n=st.integers(1, 4_000),
    levels=st.sampled_from([(7,), (13,), (31,), (57,), (7, 7), (13, 7), (3, 7, 7)]),
    layout=st.sampled_from(["aligned", "balanced"]),
    causal=st.booleans(),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_every_rectangle_is_in_exactly_one_batch(
    n: int, levels: tuple[int, ...], layout: str, causal: bool, data: st.DataObject
) -> None:
    shape = Decomposition(n, levels, layout, tile=16)
    task = shape.task(tuple(data.draw(st.integers(0, c - 1)) for c in levels))
    rectangles = task.rectangles(causal, n, n)
    found = [
        batch.rectangle(number)
        for batch in batches(tuple(rectangles))
        for number in range(batch.count)
    ]
    assert sorted(found, key=repr) == sorted(rectangles, key=repr)
