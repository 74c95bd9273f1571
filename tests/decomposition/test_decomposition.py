"""Decomposition itself: its errors, layouts, paths, and plans that stay symbolic."""

import itertools
import sys

import pytest

from quorum_attention.decomposition import Decomposition


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"n_tokens": -1}, ValueError, "n_tokens must be at least 0, got -1"),
        ({"n_tokens": 7.0}, TypeError, "n_tokens must be a whole number, got 7.0"),
        ({"n_tokens": True}, TypeError, "n_tokens must be a whole number, got True"),
        ({"tile": 0}, ValueError, "tile must be at least 1, got 0"),
        ({"tile": "128"}, TypeError, "tile must be a whole number, got '128'"),
        ({"layout": "ragged"}, ValueError, "'aligned' or 'balanced', got 'ragged'"),
        ({"levels": [7]}, TypeError, "levels must be a tuple"),
        ({"levels": 7}, TypeError, "levels must be a tuple"),
        ({"levels": (7, 8)}, ValueError, "no interest set has 8 chunks"),
        ({"levels": (43,)}, ValueError, "nearest chunk counts are 31 and 57"),
        ({"levels": (0,)}, ValueError, "at least 1"),
        ({"levels": (7.0,)}, TypeError, "whole number"),
    ],
)
def test_bad_fields_are_refused(fields, error, message):
    """Before anything is done with them, and by name."""
    with pytest.raises(error, match=message):
        Decomposition(**{"n_tokens": 100, **fields})


@pytest.mark.parametrize("path", [(), (0,), (0, 0, 0), (7, 0), (0, 3), (-1, 0)])
def test_a_path_that_no_task_has_is_refused(path):
    """Wrong depth, and owners beyond their level's chunks or negative."""
    with pytest.raises(ValueError, match="path must be one owner chunk"):
        Decomposition(100, (7, 3)).task(path)


@pytest.mark.parametrize("path", [[1, 2], (1.0, 2), (True, 0), "12", 5, None])
def test_a_path_is_a_tuple_of_whole_numbers(path):
    """(1.0, 2) and (True, 2) equal (1, 2) and would name the same task twice."""
    with pytest.raises(TypeError, match="path must be a tuple of whole numbers"):
        Decomposition(100, (7, 3)).task(path)


def test_paths_are_all_owner_tuples_in_order():
    """tasks() and n_tasks agree with them."""
    decomposition = Decomposition(100, (7, 3))
    expected = list(itertools.product(range(7), range(3)))
    assert list(decomposition.paths()) == expected
    assert [t.path for t in decomposition.tasks()] == expected
    assert decomposition.n_tasks == len(expected)
    assert Decomposition(100).n_tasks == 1
    assert list(Decomposition(100).paths()) == [()]


def test_deeper_adds_a_level_and_keeps_the_rest():
    """What recovery makes of a plan that did not fit."""
    before = Decomposition(100, (7,), "balanced", 16)
    assert before.deeper(3) == Decomposition(100, (7, 3), "balanced", 16)
    assert before.levels == (7,)
    assert (before.depth, before.deeper(3).depth) == (1, 2)
    with pytest.raises(ValueError, match="no interest set"):
        before.deeper(5)


def test_deeper_tasks_are_inside_their_parent():
    """Replacing one task by its children keeps coverage: same tokens, same exclusions."""
    parent, child = Decomposition(100, (7,), tile=4), Decomposition(100, (7, 3), tile=4)
    for owner in range(7):
        held = {p for s in parent.task((owner,)).spans for p in range(s.start, s.stop)}
        found = set()
        for below in range(3):
            task = child.task((owner, below))
            found |= {p for s in task.spans for p in range(s.start, s.stop)}
        assert found == held


@pytest.mark.parametrize("tile", [1, 4, 128])
def test_aligned_boundaries_are_multiples_of_the_tile(tile):
    """Only the end of the sequence may be elsewhere."""
    n = 12_345
    for task in Decomposition(n, (7, 3), "aligned", tile).tasks():
        for span in task.spans:
            assert span.start % tile == 0
            assert span.stop % tile == 0 or span.stop == n
    assert Decomposition(100 * tile, (7,), "aligned", tile).max_task_tokens == 3 * 15 * tile


def test_balanced_chunks_differ_by_at_most_one_token():
    """The paper's layout: the longer chunks come first."""
    spans = Decomposition(100, (7,), "balanced").task((0,)).spans
    assert [s.stop - s.start for s in spans] == [15, 15, 14]  # chunks 0, 1 and 3
    assert spans[0].start == 0
    assert spans[-1].start == 44


def test_a_billion_tokens_stay_symbolic():
    """No array by token anywhere: a few spans a task, a few hundred bytes, few rectangles."""
    decomposition = Decomposition(10**9, (57, 57))
    for path in [(0, 0), (13, 56), (56, 0), (31, 32)]:
        task = decomposition.task(path)
        assert task.n_tokens > 10**7
        assert len(task.spans) <= 2 * 8 * 2
        size = sys.getsizeof(task) + sys.getsizeof(task.spans) + sys.getsizeof(task.local_starts)
        assert size + sum(sys.getsizeof(s) for s in task.spans) < 4096
        assert len(task.rectangles(True)) <= 4 * len(task.spans)
        assert len(task.runs) <= len(task.spans)
    assert decomposition.n_tasks == 57 * 57
    assert next(decomposition.tasks()).path == (0, 0)  # lazily: the other 3248 are not made


@pytest.mark.parametrize("layout", ["aligned", "balanced"])
@pytest.mark.parametrize(
    ("n", "levels"), [(5000, (13,)), (5000, (7, 13)), (300, (3, 1, 7)), (9, ())]
)
def test_a_path_through_a_token_leads_to_a_task_that_holds_it(n, levels, layout):
    """Of every token, and of several tasks that hold it."""
    shape = Decomposition(n, levels, layout, 16)
    for position in (0, 1, n // 7, n // 2, n - 1):
        paths = {shape.path_through(position, turn) for turn in range(4)}
        assert len(paths) == 4 or levels != (13,)
        for path in paths:
            assert any(s.start <= position < s.stop for s in shape.task(path).spans)
    with pytest.raises(ValueError, match=f"position must be from 0 to {n - 1}, got {n}"):
        shape.path_through(n)
