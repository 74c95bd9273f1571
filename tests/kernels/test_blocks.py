"""Blocks of rows cover everything once, none larger than the limit where it can be helped."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.kernels.blocks import BLOCK_BYTES, row_blocks


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 30)),
    row_bytes=st.sampled_from([0, 1, BLOCK_BYTES // 9, BLOCK_BYTES // 2, BLOCK_BYTES, 1 << 30]),
)
def test_every_row_once(sizes: tuple[int, int, int], row_bytes: int) -> None:
    seen = torch.zeros(sizes, dtype=torch.int32)
    for block in row_blocks(*sizes, row_bytes):
        seen[block] += 1
        n_rows = seen[block].numel()
        assert n_rows >= 1
        assert n_rows == 1 or n_rows * row_bytes <= BLOCK_BYTES
    assert (seen == 1).all()


def test_what_fits_is_one_block() -> None:
    assert list(row_blocks(2, 3, 4, 8)) == [(slice(0, 2), slice(0, 3), slice(0, 4))]


def test_rows_of_a_head_stay_together() -> None:
    """Several heads at a time only where all their rows fit."""
    blocks = list(row_blocks(2, 4, 10, BLOCK_BYTES // 25))
    assert blocks[0] == (slice(0, 1), slice(0, 2), slice(0, 10))
    assert len(blocks) == 4
