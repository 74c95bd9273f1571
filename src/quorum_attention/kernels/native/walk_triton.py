# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""The clear part of a run, whose pairs a block need not test, and its ragged parts."""

import triton
import triton.language as tl


@triton.jit
def keys_of_run(
    entries,
    index,
    first,
    n_queries,
    left,
    right,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    BITS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Bounds of the ``index``-th entry of a table (runs.py) for the block that begins at ``first``.

    FIELDS: columns of the table.

    Returns:
        (row_low, row_high, diagonal, distance, start, begin, end, stop): keys from ``begin`` to
        ``end`` are whole blocks that every row keeps; those from ``start`` to ``begin`` and from
        ``end`` to ``stop`` are ragged.
    """
    at = entries + index * FIELDS
    row_low = tl.load(at)
    row_high = tl.load(at + 1)
    # Positions fit 32 bits; their sums with NO_DIAGONAL or UNLIMITED do not.
    start = tl.load(at + 2).to(tl.int64)
    high = tl.load(at + 3)
    diagonal = tl.load(at + 4)
    distance = tl.load(at + 5)
    below = diagonal.to(tl.int64)
    # No row keeps a key beyond the last row's diagonal; every row keeps the keys up to the first
    # row's diagonal.
    stop = tl.minimum(high, row_high + below)
    clear = tl.minimum(high, first + below + 1)
    if WINDOW:
        apart = distance.to(tl.int64)
        stop = tl.minimum(stop, row_high + apart + right)
        clear = tl.minimum(clear, first + apart + right + 1)
        start = tl.maximum(start, row_low + apart - left)
    stop = tl.maximum(stop, start)
    begin = start
    if WINDOW:
        # The whole blocks of keys that the left edge of the window may cut.
        ragged = tl.maximum(0, row_high - 1 + apart - left - start)
        begin = tl.minimum(start + tl.cdiv(ragged, BLOCK_N) * BLOCK_N, stop)
    whole = (row_low == first) & (row_high == tl.minimum(first + BLOCK_M, n_queries))
    if BITS:
        whole = whole & (tl.load(at + 6) == 0)
    clear = tl.where(whole, tl.maximum(clear, begin), begin)
    end = begin + (clear - begin) // BLOCK_N * BLOCK_N
    return (
        row_low, row_high, diagonal, distance,
        start.to(tl.int32), begin.to(tl.int32), end.to(tl.int32), stop.to(tl.int32),
    )  # fmt: skip


@triton.jit
def rows_of_run(
    entries,
    index,
    first,
    n_keys,
    left,
    right,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    BITS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """``keys_of_run`` for a table by blocks of keys, of the block that begins at key ``first``.

    Returns:
        (start, begin, end, stop): queries from ``begin`` to ``end`` are whole blocks that keep
        every key; those from ``start`` to ``begin`` and from ``end`` to ``stop`` are ragged.
    """
    at = entries + index * FIELDS
    low = tl.load(at)
    high = tl.load(at + 1)
    column_low = tl.load(at + 2)
    column_high = tl.load(at + 3)
    below = tl.load(at + 4).to(tl.int64)
    # Rows before the first key's diagonal keep no key; from the last key's diagonal on, all keys.
    start = tl.maximum(low, column_low - below)
    clear = tl.maximum(low, column_high - 1 - below)
    stop = high.to(tl.int64)
    beyond = stop
    if WINDOW:
        apart = tl.load(at + 5).to(tl.int64)
        start = tl.maximum(start, column_low - apart - right)
        clear = tl.maximum(clear, column_high - 1 - apart - right)
        stop = tl.minimum(stop, column_high - apart + left)
        beyond = tl.minimum(beyond, column_low - apart + left + 1)
    stop = tl.maximum(stop, start)
    whole = (column_low == first) & (column_high == tl.minimum(first + BLOCK_N, n_keys))
    if BITS:
        whole = whole & (tl.load(at + 6) == 0)
    ragged = tl.where(whole, tl.maximum(0, clear - start), stop - start)
    begin = tl.minimum(start + tl.cdiv(ragged, BLOCK_M) * BLOCK_M, stop)
    beyond = tl.minimum(tl.maximum(beyond, begin), stop)
    end = begin + (beyond - begin) // BLOCK_M * BLOCK_M
    return start.to(tl.int32), begin.to(tl.int32), end.to(tl.int32), stop.to(tl.int32)
