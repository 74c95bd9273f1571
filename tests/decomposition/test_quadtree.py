"""The walk by halves of halves against looking at every pair."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Interval, Ranges, Verdict
from quorum_attention.decomposition.quadtree import halves, quarters, walk

SIDES = st.integers(1, 40)


@st.composite
def patterns(draw) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Which of some pairs are kept: rectangles, so that there is something to be sure of."""
    kept = np.zeros((draw(SIDES), draw(SIDES)), dtype=bool)
    for _ in range(draw(st.integers(0, 4))):
        (a, b), (c, d) = (sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
                          for n in kept.shape)  # fmt: skip
        kept[a:b, c:d] ^= True
    return kept


@settings(max_examples=200, deadline=None)
@given(patterns(), st.sampled_from([1, 3, 8]), st.booleans())
def test_leaves_are_all_there_is_and_their_verdicts_right(kept, unit, by_level) -> None:
    def of(block: Ranges) -> np.ndarray:
        return kept[slice(*block.queries), slice(*block.keys)]

    asked: list[Ranges] = []

    def verdict(block: Ranges) -> Verdict:
        asked.append(block)
        part = of(block)
        return FULL if part.all() else PARTIAL if part.any() else EMPTY

    def parts(block: Ranges, found: Verdict) -> list[Ranges]:
        return quarters(block, unit) if found is PARTIAL else []

    times = np.zeros(kept.shape, dtype=int)
    for block, found in walk(Ranges.of(0, len(kept), 0, kept.shape[1]), verdict, parts,
                             by_level=by_level):  # fmt: skip
        assert block == asked[-1], "asked when it is its turn, not before"
        times[slice(*block.queries), slice(*block.keys)] += 1
        part = of(block)
        if found is PARTIAL:
            assert part.any()
            assert not part.all()
            assert all((stop - 1) // unit == start // unit for start, stop in block)
        else:
            assert (part == (found is FULL)).all()
    assert (times == 1).all(), "every pair in exactly one"
    assert len(asked) == len(set(asked)), "and none asked twice"


@given(st.integers(0, 200), st.integers(1, 200), st.integers(1, 20))
def test_halves(start, length, unit) -> None:
    one = Interval(start, start + length)
    found = halves(one, unit)
    inside = [at for at in range(one.start + 1, one.stop) if at % unit == 0]
    if not inside:
        assert found == ()
        return
    (low, middle), (again, high) = found
    assert (low, high) == one
    assert middle == again
    assert middle in inside
    below, above = (sum(at < middle for at in inside), sum(at > middle for at in inside))
    assert abs(below - above) <= 1, "by as many units, not at the first that comes"


def test_parts_come_out_where_the_whole_stood() -> None:
    """Depth first they are in reading order; by level the larger ones are first."""
    tree = {"whole": ["a", "b", "c"], "b": ["b1", "b2"], "c": []}

    def parts(node: str, found: Verdict) -> list[str]:
        return tree.get(node, [])

    def leaves(by_level: bool) -> list[str]:
        return [node for node, _ in walk("whole", lambda _: PARTIAL, parts, by_level=by_level)]

    assert leaves(by_level=False) == ["a", "b1", "b2", "c"]
    assert leaves(by_level=True) == ["a", "c", "b1", "b2"]


def test_a_verdict_sees_what_was_done_about_the_leaves_before() -> None:
    """Who has found enough can stop asking: trimming marks cells, and asks of unmarked ones."""
    done: set[int] = set()

    def verdict(node: int) -> Verdict:
        return EMPTY if done else FULL

    found = []
    for node, said in walk(0, verdict, lambda node, _: [1, 2, 3] if node == 0 else []):
        found.append(said)
        done.add(node)
    assert found == [FULL, EMPTY, EMPTY]
