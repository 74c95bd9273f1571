"""Decompositions: errors, paths, tasks as the paper's that hold every pair once, the
census."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from helpers.decomposition import (
    bits,
    build_subseq,
    decompositions,
    kept_pairs,
    positions,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Census, Decomposition, Pairs, census


def test_what_makes_no_sense_is_refused():
    """(1.0, 2) and (True, 2) equal (1, 2) and would name the same task twice; a limit
    below 1 must not pass for no limit."""
    numbers = [
        ("n_tokens", -1),
        ("n_tokens", 7.0),
        ("n_tokens", True),
        ("tile", 0),
        ("tile", "9"),
    ]
    others = [
        ("layout", "ragged"),
        ("levels", [7]),
        ("levels", (7, 8)),
        ("levels", (7.0,)),
    ]
    for name, value in numbers + others:
        with pytest.raises(
            (TypeError, ValueError), match=name if name != "levels" else "chunk|c "
        ):
            Decomposition(**{"n_tokens": 100, name: value})
    decomposition = Decomposition(100, (7, 3))
    for path in [(), (0,), (0, 0, 0), (7, 0), (0, 3), (-1, 0)]:
        with pytest.raises(ValueError, match="path must be one owner chunk"):
            decomposition.task(path)
    for path in [[1, 2], (1.0, 2), (True, 0), "12", 5, None]:
        with pytest.raises(TypeError, match="path must be a tuple of whole numbers"):
            decomposition.task(path)
    for name, value in [
        ("max_queries", 0),
        ("max_keys", 2.5),
        ("n_queries", -1),
        ("n_keys", True),
    ]:
        with pytest.raises((TypeError, ValueError), match=name):
            decomposition.task((0, 0)).rectangles(True, **{name: value})


def test_a_billion_tokens_stay_symbolic():
    """No array by token anywhere: a few spans a task, a few hundred bytes, few
    rectangles."""
    decomposition = Decomposition(10**9, (57, 57))
    for path in [(0, 0), (13, 56), (56, 0), (31, 32)]:
        task = decomposition.task(path)
        assert task.n_tokens > 10**7
        assert len(task.spans) <= 2 * 8 * 2
        size = (
            sys.getsizeof(task)
            + sys.getsizeof(task.spans)
            + sys.getsizeof(task.local_starts)
        )
        assert size + sum(sys.getsizeof(s) for s in task.spans) < 4096
        assert len(task.rectangles(True)) <= 4 * len(task.spans)
        assert len(task.runs) <= len(task.spans)
    assert decomposition.n_tasks == 57 * 57
    assert next(decomposition.tasks()).path == (
        0,
        0,
    )  # lazily: the other 3248 are not made


@settings(max_examples=100, deadline=None)
@given(decompositions(), st.booleans(), st.data())
def test_contiguous_parts_have_the_pairs_of_a_rectangle(
    decomposition, is_causal, data
) -> None:
    """Each pair in one part, and what is causal still cut at the diagonal of the
    sequence."""
    path = tuple(data.draw(st.integers(0, c - 1)) for c in decomposition.levels)
    task = decomposition.task(path)
    where = positions(task)
    for r in task.rectangles(is_causal):
        times = np.zeros((r.n_queries, r.n_keys), dtype=int)
        for queries, keys, causal in task.contiguous(r):
            top, left = queries.local - r.query_start, keys.local - r.key_start
            rows, columns = (
                slice(top, top + queries.length),
                slice(left, left + keys.length),
            )
            part = np.ones((queries.length, keys.length), dtype=int)
            times[rows, columns] += np.tril(part) if causal else part
            assert not causal or queries == keys
        q, k = where[r.query_start : r.query_stop], where[r.key_start : r.key_stop]
        expected = (
            q[:, None] >= k[None] if r.causal else np.ones_like(times, dtype=bool)
        )
        np.testing.assert_array_equal(times, expected)


@settings(max_examples=200, deadline=None)
@given(decompositions())
def test_spans_ascend_do_not_touch_needlessly_and_stay_within_the_bound(decomposition):
    """Ascending, disjoint, not empty, inside the sequence, and maximal: one span per
    label run. Slots are allocated by max_task_tokens before any task is made."""
    assert decomposition.max_task_tokens <= decomposition.n_tokens
    for task in decomposition.tasks():
        assert task.n_tokens == len(positions(task)) <= decomposition.max_task_tokens
        spans = task.spans
        assert all(0 <= s.start < s.stop <= decomposition.n_tokens for s in spans)
        for a, b in itertools.pairwise(spans):
            assert a.stop <= b.start
            assert a.stop < b.start or a.bits != b.bits


@settings(max_examples=300, deadline=None)
@given(decompositions(200), st.booleans())
@example(Decomposition(49, (7, 7), "balanced"), True)
@example(Decomposition(5, (7,), "balanced"), False)
@example(Decomposition(150, (7, 3, 7), "balanced"), False)
@example(Decomposition(0, (7,)), True)
@example(Decomposition(100, ()), True)
def test_masks_cover_every_pair_once(decomposition, is_causal):
    """No pair is missing and none is counted twice, over all tasks' masks. (That
    rectangles are exactly these masks: test_rectangles.py.)"""
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
    """Same tokens in the same order; two tokens share a bit where they share a
    non-owner chunk."""
    decomposition = Decomposition(n_tokens, levels, "balanced")
    for task in decomposition.tasks():
        token_ids, groups = build_subseq(n_tokens, levels, task.path)
        np.testing.assert_array_equal(positions(task), np.array(token_ids, dtype=int))
        assert [own.bit_count() for own in bits(task)] == [
            len(group) for group in groups
        ]
        kept = [[not (a & b) for b in groups] for a in groups]
        expected = np.array(kept, dtype=bool).reshape(len(groups), len(groups))
        np.testing.assert_array_equal(task.mask(), expected)


@pytest.mark.parametrize(
    ("n_tokens", "depth", "masked", "clear", "mixed"),
    [(65_536, 1, 22.0, 77.2, 0.82), (65_536, 2, 38.8, 58.9, 2.30)],
)
def test_the_papers_census(n_tokens, depth, masked, clear, mixed):
    """Appendix A.2: balanced, c = 7, causal, 128 x 128 tiles, pooled over all tasks."""
    tasks = Decomposition(n_tokens, (7,) * depth, "balanced").tasks()
    found = census(tasks, Pairs(n_tokens, n_tokens, True))
    assert round(100 * found.masked, 1) == masked
    assert round(100 * found.clear, 1) == clear
    assert round(100 * found.mixed, 2) == mixed


@settings(max_examples=80, deadline=None)
@given(decompositions(), st.booleans(), st.sampled_from([1, 3, 8, 32]))
def test_census_agrees_with_a_dense_count(decomposition, is_causal, tile):
    """By tile and token, with the paper's OR and AND tests spelled out."""
    masked = clear = mixed = 0
    for task in decomposition.tasks():
        own = bits(task)
        lines = [own[i : i + tile] for i in range(0, len(own), tile)]
        some = [np.bitwise_or.reduce(line) for line in lines]
        every = [np.bitwise_and.reduce(line) for line in lines]
        for row in range(len(lines)):
            for column in range(row + 1 if is_causal else len(lines)):
                if some[row] & some[column] == 0:
                    clear += 1
                elif every[row] & every[column]:
                    masked += 1
                else:
                    mixed += 1
    pairs = Pairs(decomposition.n_tokens, decomposition.n_tokens, is_causal)
    found = census(decomposition.tasks(), pairs, tile)
    counts = masked, clear, mixed
    assert found == Census(*(n / max(1, sum(counts)) for n in counts), sum(counts))
