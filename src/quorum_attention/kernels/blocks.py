"""Cut strided (batch, heads, rows, ...) tensors into blocks whose temporaries stay small."""

from __future__ import annotations

from collections.abc import Iterator

Block = tuple[slice, slice, slice]

BLOCK_BYTES = 2 * 1024 * 1024
"""Bytes of one block in fp32 (or fp64); an elementwise step holds a few blocks at a time."""


def row_blocks(batch: int, heads: int, rows: int, row_bytes: int) -> Iterator[Block]:
    """Yield index triples that cover (batch, heads, rows) once.

    Each block holds at most ``BLOCK_BYTES`` at ``row_bytes`` bytes a row, or one row if a single
    row is larger. The batch is cut first, then the heads, then the rows, so that a block consists
    of few, long contiguous runs.
    """
    if batch == 0 or heads == 0 or rows == 0:
        return
    fit = max(1, BLOCK_BYTES // max(1, row_bytes))
    n_rows = min(rows, fit)
    n_heads = min(heads, fit // n_rows) if n_rows == rows else 1
    n_batch = min(batch, fit // (n_rows * n_heads)) if n_heads == heads and n_rows == rows else 1
    for b in range(0, batch, n_batch):
        for h in range(0, heads, n_heads):
            for r in range(0, rows, n_rows):
                yield slice(b, b + n_batch), slice(h, h + n_heads), slice(r, r + n_rows)
