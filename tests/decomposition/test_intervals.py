"""The algebra of intervals against sets of positions, one by one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quorum_attention.decomposition.intervals import (
    Cells,
    Interval,
    counted,
    covered,
    union,
    without,
)

N = 60
PLACES = st.integers(0, N)
ANY = st.builds(lambda a, b: Interval(*sorted((a, b))), PLACES, PLACES)
NOT_EMPTY = ANY.filter(lambda one: one.length > 0)
SOME = st.lists(NOT_EMPTY, max_size=8)


@st.composite
def disjoint(draw) -> list[Interval]:  # type: ignore[no-untyped-def]
    """Ascending, some of them touching."""
    edges = sorted(draw(st.sets(PLACES, max_size=14)))
    return [Interval(a, b) for a, b in pairwise(edges) if draw(st.booleans())]


def positions(intervals) -> set[int]:  # type: ignore[no-untyped-def]
    return {at for start, stop in intervals for at in range(start, stop)}


def ascending(found, apart: int = 0) -> None:  # type: ignore[no-untyped-def]
    """None is empty, none reaches into the next, nor nearer to it than ``apart``."""
    assert all(type(one) is Interval and one.start < one.stop for one in found)
    assert all(one.stop + apart <= after.start for one, after in pairwise(found))


@given(SOME, st.integers(0, 9))
def test_union(intervals, gap) -> None:
    found = union(intervals, gap)
    ascending(found, apart=gap)
    whole = positions(intervals)
    holes = positions(found) - whole
    assert whole <= positions(found)
    # Only gaps that are short enough are filled, and all of those.
    for start, stop in union((at, at + 1) for at in holes):
        assert stop - start < gap
        assert {start - 1, stop} <= whole
    assert gap > 1 or not holes


@given(disjoint(), disjoint())
def test_without(intervals, others) -> None:
    found = without(intervals, others)
    ascending(found)
    assert positions(found) == positions(intervals) - positions(others)
    assert counted(found) == len(positions(found))


@given(st.lists(ANY, max_size=10), st.integers(1, 4))
def test_covered(intervals, least) -> None:
    found = covered(intervals, least)
    ascending(found, apart=1)
    have = Counter(at for start, stop in intervals for at in range(start, stop))
    assert positions(found) == {at for at, count in have.items() if count >= least}


@given(st.lists(ANY, max_size=6))
def test_cells(intervals) -> None:
    """Every interval is a row of cells, and no cell is cut by another interval's edge."""
    cells = Cells(edge for one in intervals for edge in one)
    every = [cells[number] for number in range(len(cells))]
    ascending(every)
    for one in intervals:
        assert positions(every[number] for number in cells.of(*one)) == positions([one])
        assert all(c.stop <= e or e <= c.start for c in every for e in one)
