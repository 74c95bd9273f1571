"""Every pair of a call is in one rectangle, however the rectangles are laid out."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from quorum_attention.decomposition import Decomposition
from quorum_attention.decomposition.pieces import Pieces, largest_chunk, pieces_of


@pytest.mark.parametrize("pieces", get_args(Pieces))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 7), (100, 100), (333, 90), (90, 333)])
@pytest.mark.parametrize("levels", [(), (7,), (21,)])
def test_every_pair_is_in_one_rectangle(pieces, causal, sizes, levels) -> None:
    n_queries, n_keys = sizes
    shape = Decomposition(max(sizes), levels, tile=8)
    task, rectangles = pieces_of(shape, pieces, causal, n_queries, n_keys)
    assert task.n_tokens == max(sizes)
    kept = np.zeros(sizes, dtype=int)
    for r in rectangles:
        assert min(r.n_queries, r.n_keys) > 0
        block = np.ones((r.n_queries, r.n_keys), dtype=int)
        kept[r.query_start : r.query_stop, r.key_start : r.key_stop] += (
            np.tril(block) if r.causal else block
        )
    wanted = np.ones(sizes, dtype=int)
    assert np.array_equal(kept, np.tril(wanted) if causal else wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_and_blocks_are_no_larger_than_chunks(causal: bool) -> None:
    """And rows are merged once: there are as few rectangles as can be."""
    shape = Decomposition(1000, (13,), tile=8)
    chunk = largest_chunk(shape)
    assert chunk == 80
    rows = pieces_of(shape, "rows", causal, 1000, 1000)[1]
    assert max(r.n_queries for r in rows) == chunk
    assert len(rows) == (2 * 13 - 1 if causal else 13)
    blocks = pieces_of(shape, "blocks", causal, 1000, 1000)[1]
    assert max(max(r.n_queries, r.n_keys) for r in blocks) == chunk
    assert len(blocks) == (13 * 14 // 2 if causal else 13 * 13)
