"""Decomposition itself: its errors, layouts, paths, and plans that stay symbolic."""

import sys

import pytest

from quorum_attention.decomposition import Decomposition


def test_what_makes_no_sense_is_refused():
    """(1.0, 2) and (True, 2) equal (1, 2) and would name the same task twice; a limit below 1 must
    not pass for no limit."""
    numbers = [("n_tokens", -1), ("n_tokens", 7.0), ("n_tokens", True), ("tile", 0), ("tile", "9")]
    others = [("layout", "ragged"), ("levels", [7]), ("levels", (7, 8)), ("levels", (7.0,))]
    for name, value in numbers + others:
        with pytest.raises((TypeError, ValueError), match=name if name != "levels" else "chunk|c "):
            Decomposition(**{"n_tokens": 100, name: value})
    shape = Decomposition(100, (7, 3))
    for path in [(), (0,), (0, 0, 0), (7, 0), (0, 3), (-1, 0)]:
        with pytest.raises(ValueError, match="path must be one owner chunk"):
            shape.task(path)
    for path in [[1, 2], (1.0, 2), (True, 0), "12", 5, None]:
        with pytest.raises(TypeError, match="path must be a tuple of whole numbers"):
            shape.task(path)
    for name, value in [("max_queries", 0), ("max_keys", 2.5), ("n_queries", -1), ("n_keys", True)]:
        with pytest.raises((TypeError, ValueError), match=name):
            shape.task((0, 0)).rectangles(True, **{name: value})


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
