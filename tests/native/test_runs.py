"""Run tables: every kept pair in exactly one run, by queries and by keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.native.pieces import NO_DIAGONAL, pieces_of
from quorum_attention.kernels.native.runs import table
from quorum_attention.kernels.operator_call import uncut


def pairs_of(starts, entries, n, m, block, axis, left=-1, right=-1) -> np.ndarray:
    """How often the table holds each pair."""
    counts = np.zeros((n, m), dtype=int)
    rows = n if axis == "query" else m
    assert len(starts) == -(-rows // block) + 1
    for b in range(len(starts) - 1):
        for q0, q1, k0, k1, diagonal, distance, mixed, _ in entries[
            starts[b] : starts[b + 1]
        ]:
            assert mixed == 0
            low, high = (q0, q1) if axis == "query" else (k0, k1)
            assert b * block <= low < high <= (b + 1) * block
            q, k = np.arange(q0, q1)[:, None], np.arange(k0, k1)[None]
            keep = q - k + diagonal >= 0
            apart = q - k + distance
            keep &= (left < 0) | (apart <= left)
            keep &= (right < 0) | (apart >= -right)
            counts[q0:q1, k0:k1] += keep
    return counts


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 150), levels=st.sampled_from([(), (3,), (7,), (13,), (3, 3), (7, 3)]),
    is_causal=st.booleans(), block=st.sampled_from([16, 32, 128]), tile=st.sampled_from([1, 4, 16]),
    axis=st.sampled_from(["query", "key"]), layout=st.sampled_from(["aligned", "balanced"]),
    left=st.integers(-1, 60), right=st.integers(-1, 60), data=st.data(),
)  # fmt: skip
def test_every_pair_once(
    n, levels, is_causal, block, tile, axis, layout, left, right, data
) -> None:
    """Of the first queries and keys, under a window of global positions."""
    task = data.draw(
        st.sampled_from(list(Decomposition(n, levels, layout, tile).tasks()))
    )
    sizes = [data.draw(st.integers(0, n)) for _ in range(2)]
    rows, columns = map(task.count_below, sizes)
    band = Band(-left if left >= 0 else None, right if right >= 0 else None)
    # Without a window positions do not matter.
    whole = uncut(task.n_tokens) if band.keeps_all else task
    found = pieces_of(task.rectangles(is_causal, *sizes), whole, Geometry(band))
    made = table(found, rows if axis == "query" else columns, block, axis)
    where = np.array([p for s in task.spans for p in range(s.start, s.stop)], dtype=int)
    apart = where[:, None] - where[None]
    expected = task.mask().astype(bool) & ((left < 0) | (apart <= left))
    expected &= ((right < 0) | (apart >= -right)) & (not is_causal or apart >= 0)
    # What the kernel tests of a window, it tests where the window has a left side.
    right = right if left >= 0 else -1
    counts = pairs_of(*made, rows, columns, block, axis, left, right)
    assert np.array_equal(counts, expected[:rows, :columns].astype(int))


def test_neighbouring_runs_are_joined() -> None:
    """At depth 1 a block of queries walks its keys in one go, the diagonal included."""
    decomposition = Decomposition(13 * 256, (13,))
    for task in list(decomposition.tasks())[:3]:
        found = pieces_of(task.rectangles(True), uncut(task.n_tokens), Geometry())
        assert max(np.diff(table(found, task.n_tokens, 128, "query")[0])) <= 1


@pytest.mark.parametrize("axis", ["query", "key"])
def test_nothing_to_do(axis) -> None:
    starts, entries = table(pieces_of([], uncut(300), Geometry()), 300, 128, axis)
    assert starts.tolist() == [0, 0, 0, 0]
    assert entries.shape == (0, 8)
    assert NO_DIAGONAL > 1 << 29


def test_distances_that_32_bits_do_not_hold_are_refused() -> None:
    far = np.array([[0, 64, 0, 64, NO_DIAGONAL, 1 << 31, 0, 0]])
    with pytest.raises(NotImplementedError, match="in 32 bits"):
        table(far, 64, 64, "query")
