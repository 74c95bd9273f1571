"""Rectangles of a task: a partition of exactly its mask, few, large and of few shapes."""

import itertools

import numpy as np
import pytest
from helpers_decomposition import count_rectangles, decompositions, kept_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition
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


@pytest.mark.parametrize(
    ("levels", "calls"),
    [((7,), 28), ((13,), 78), ((31,), 310), ((57,), 798), ((7, 7), 216), ((3, 3, 3), 54)],
)
def test_plain_attention_takes_few_calls(levels, calls):
    """All tasks together: 2 (l - 1) a task at depth 1; either way of placing owned diagonals
    wins for some of these."""
    decomposition = Decomposition(7_000_000, levels)
    assert sum(len(task.rectangles(False)) for task in decomposition.tasks()) <= calls


@pytest.mark.parametrize("levels", [(7,), (57,), (7, 7), (13, 7), (7, 7, 7)])
@pytest.mark.parametrize("layout", ["aligned", "balanced"])
def test_no_two_causal_calls_could_be_one(levels, layout):
    """Plain rectangles that share their queries or keys and touch are one call, not two."""
    for task in Decomposition(1_000_003, levels, layout).tasks():
        plain = [r for r in task.rectangles(True) if not r.causal]
        for a, b in itertools.permutations(plain, 2):
            beside = (a.query_start, a.query_stop) == (b.query_start, b.query_stop)
            under = (a.key_start, a.key_stop) == (b.key_start, b.key_stop)
            assert not (beside and a.key_stop == b.key_start)
            assert not (under and a.query_stop == b.query_start)


@pytest.mark.parametrize(
    ("levels", "causal_calls", "plain_calls"),
    [((7, 7), 118, 194), ((13, 7), 243, 418), ((7, 7, 7), 593, 1081)],
)
def test_deep_tasks_take_few_calls(levels, causal_calls, plain_calls):
    """All tasks together; without joining what touches it is a tenth more."""
    tasks = list(Decomposition(int(np.prod(levels)) * 1024, levels).tasks())
    assert sum(len(task.rectangles(True)) for task in tasks) <= causal_calls
    assert sum(len(task.rectangles(False)) for task in tasks) <= plain_calls


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        ({"max_queries": 0}, ValueError, "max_queries must be at least 1, got 0"),
        ({"max_keys": -3}, ValueError, "max_keys must be at least 1, got -3"),
        ({"n_queries": -1}, ValueError, "n_queries must be at least 0, got -1"),
        ({"n_keys": 1.5}, TypeError, "n_keys must be a whole number or None, got 1.5"),
        ({"max_keys": 2.5}, TypeError, "max_keys must be a whole number or None, got 2.5"),
        ({"max_queries": True}, TypeError, "max_queries must be a whole number"),
    ],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_impossible_limits_are_refused(limits, error, message, is_causal):
    """A limit below 1 must not pass for no limit, nor leave pairs out."""
    task = Decomposition(1000, (7,)).task((0,))
    with pytest.raises(error, match=message):
        task.rectangles(is_causal, **limits)


@pytest.mark.parametrize("levels", [(7,), (13,), (31,), (7, 7)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_aligned_chunks_give_few_shapes(levels, is_causal):
    """Equal chunks without a ragged tail: cuDNN builds a plan for every new shape, so tasks
    must share theirs."""
    c = int(np.prod(levels))
    decomposition = Decomposition(c * 128 * 8, levels)
    shapes, calls = set(), 0
    for task in decomposition.tasks():
        for r in task.rectangles(is_causal):
            shapes.add((r.n_queries, r.n_keys, r.causal))
            calls += 1
    if len(levels) == 1:
        assert len(shapes) <= quorum_size(c) + 1
    else:
        assert len(shapes) <= calls // 5


@pytest.mark.parametrize("c", [7, 13, 31, 57])
def test_half_of_the_work_is_in_one_call(c):
    """The triangle splits by halving: one plain call is by far the largest."""
    task = Decomposition(c * 128 * 10, (c,)).task((0,))
    pairs = [r.pairs for r in task.rectangles(True) if not r.causal]
    assert max(pairs) >= 0.5 * sum(pairs)


def test_a_row_is_merged_about_log_l_times():
    """Every merge reads and writes a row's output: log2 l of them, not l."""
    task = Decomposition(57 * 128, (57,)).task((0,))
    visits = np.zeros(task.n_tokens, dtype=int)
    for r in task.rectangles(True):
        visits[r.query_start : r.query_stop] += 1
    assert visits.max() <= 4  # log2 8, and the causal square


def test_depth_zero_is_one_call():
    """The monolithic task has no mask: one causal square, or one plain rectangle."""
    task = Decomposition(1000).task(())
    (square,) = task.rectangles(True)
    assert (square.causal, square.n_queries, square.n_keys) == (True, 1000, 1000)
    (plain,) = task.rectangles(False)
    assert (plain.causal, plain.n_queries, plain.n_keys) == (False, 1000, 1000)


def test_no_tokens_no_rectangles():
    """An empty sequence, and limits of no queries or keys, leave nothing to launch."""
    assert Decomposition(0, (7,)).task((0,)).rectangles(True) == ()
    task = Decomposition(100, (3,), tile=1).task((0,))
    assert task.rectangles(True, n_queries=0) == ()
    assert task.rectangles(False, n_keys=0) == ()
