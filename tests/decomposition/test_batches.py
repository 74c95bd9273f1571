"""Rectangles put together into one call: each once, never two on the same rows or columns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition, Rectangle
from quorum_attention.decomposition.batches import Batch, batches


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
    found = [r for batch in batches(tuple(rectangles)) for r in batch.rectangles()]
    assert sorted(found, key=repr) == sorted(rectangles, key=repr)


@pytest.mark.parametrize("c", [7, 13, 21, 31, 57, 73, 183])
def test_rows_and_columns_of_a_batch_do_not_meet(c: int) -> None:
    shape = Decomposition(c * 256, (c,))
    for i in range(c):
        for batch in batches(shape.task((i,)).rectangles(True)):
            queries = [range(r.query_start, r.query_stop) for r in batch.rectangles()]
            keys = [range(r.key_start, r.key_stop) for r in batch.rectangles()]
            for ranges in (queries, keys):
                covered = [position for one in ranges for position in one]
                assert len(covered) == len(set(covered))


def test_a_halved_triangle_takes_one_call_a_halving() -> None:
    # 8 chunks: 4x4, two of 2x2, four of 1x1, and the owned diagonal.
    found = batches(Decomposition(57 * 128, (57,)).task((0,)).rectangles(True))
    assert sorted(batch.count for batch in found) == [1, 1, 2, 4]


def test_what_lies_irregularly_stays_apart() -> None:
    a, b, c = Rectangle(0, 8, 0, 8), Rectangle(8, 16, 0, 8), Rectangle(20, 28, 30, 38)
    # a and b share their keys: only (a, c) may go together.
    assert batches((a, b, c)) == (Batch(a, 2, 20, 30), Batch(b))
