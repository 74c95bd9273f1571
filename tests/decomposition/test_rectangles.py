"""Rectangles of a task, pieces, passages and batches: every pair is in exactly one."""

from __future__ import annotations

import random
from typing import get_args

import numpy as np
import pytest
import torch
from helpers.decomposition import count_rectangles, decompositions, kept_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition
from quorum_attention.decomposition.chunk_stream import ChunkStream
from quorum_attention.decomposition.layouts import Pieces, pieces_of
from quorum_attention.decomposition.rectangles import batches
from quorum_attention.quorums import quorum_size

LIMITS, SIZES = st.none() | st.integers(1, 200), st.none() | st.integers(0, 300)


@settings(max_examples=200, deadline=None)
@given(decompositions(300), st.data(), st.booleans(), SIZES, SIZES, LIMITS, LIMITS)
def test_rectangles_partition_the_masks_kept_pairs(
    decomposition, data, is_causal, n_queries, n_keys, max_queries, max_keys
):
    """Each task by itself: nothing masked is computed, nothing kept is left out or
    repeated; and each rectangle is in one batch."""
    path = tuple(data.draw(st.integers(0, c - 1)) for c in decomposition.levels)
    task = decomposition.task(path)
    rectangles = task.rectangles(is_causal, n_queries, n_keys, max_queries, max_keys)
    counts = count_rectangles(rectangles, task.n_tokens)
    np.testing.assert_array_equal(
        counts, kept_pairs(task, is_causal, n_queries, n_keys)
    )
    assert is_causal or not any(r.causal for r in rectangles)
    for r in rectangles:
        assert max_queries is None or r.n_queries <= max_queries
        assert max_keys is None or r.n_keys <= max_keys
    found = [
        one.rectangle(i) for one in batches(tuple(rectangles)) for i in range(one.count)
    ]
    assert sorted(found, key=repr) == sorted(rectangles, key=repr)


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


@pytest.mark.parametrize("pieces", get_args(Pieces))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 7), (100, 100), (333, 90), (90, 333)])
@pytest.mark.parametrize("levels", [(), (7,), (21,)])
def test_every_pair_is_in_one_rectangle(pieces, causal, sizes, levels) -> None:
    n_queries, n_keys = sizes
    decomposition = Decomposition(max(sizes), levels, tile=8)
    task, rectangles = pieces_of(decomposition, pieces, causal, n_queries, n_keys)
    assert task.n_tokens == max(sizes)
    kept, wanted = (
        count_rectangles(rectangles, max(sizes)),
        np.zeros((max(sizes),) * 2, dtype=int),
    )
    wanted[:n_queries, :n_keys] = 1
    assert np.array_equal(kept, np.tril(wanted) if causal else wanted)


@pytest.mark.parametrize("stays", ["query", "key"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_pair_of_a_passage_is_in_one_rectangle(stays, is_causal) -> None:
    draw = random.Random(torch.initial_seed())
    for _ in range(300):
        n_queries, n_keys = (draw.randint(1, 40) for _ in range(2))
        queries, keys = (draw.randint(1, 45) for _ in range(2))
        stream = ChunkStream(stays, n_queries, n_keys, queries, keys, is_causal)
        assert stream.fewest_units <= stream.n_units
        seen = np.zeros((n_queries, n_keys), dtype=int)
        chunks_of: dict[int, list[int]] = {}
        for chunk in range(stream.n_chunks):
            plain = stream.full_blocks(chunk)
            assert set(plain) <= set(stream.blocks(chunk))
            for block in stream.blocks(chunk):
                chunks_of.setdefault(block, []).append(chunk)
                both = stream.chunk(chunk), stream.block(block)
                rows, columns = both if stays == "query" else both[::-1]
                found = stream.rectangles(chunk, block)
                assert found, "a block without pairs"
                size = keys if stays == "query" else queries
                whole = (
                    len(found) == 1 and found[0].pairs == rows.length * columns.length
                )
                full = (columns if stays == "query" else rows).stop % size == 0
                assert (block in plain) == (whole and full and not found[0].causal)
                for r in found:
                    there = seen[rows.start : rows.stop, columns.start : columns.stop]
                    part = there[r.query_start : r.query_stop, r.key_start : r.key_stop]
                    assert part.shape == (r.n_queries, r.n_keys)
                    assert r.pairs > 0
                    if r.causal:
                        assert r.n_queries == r.n_keys
                        assert rows.start + r.query_start == columns.start + r.key_start
                        part += np.tril(np.ones(part.shape, dtype=int))
                    else:
                        part += 1
        kept = np.ones((n_queries, n_keys), dtype=int)
        assert np.array_equal(seen, np.tril(kept) if is_causal else kept)
        if stays == "key":
            assert set(chunks_of) == set(range(stream.n_blocks))
            for block, chunks in chunks_of.items():
                assert chunks[0] == 0
                assert chunks == list(range(chunks[-1] + 1))
                assert chunks[-1] == stream.last_chunk(block)
