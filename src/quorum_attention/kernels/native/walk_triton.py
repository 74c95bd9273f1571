# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""Which keys of a run a block of queries walks without a question, and which it has to ask."""

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
):
    """Bounds of the ``index``-th entry of a table (runs.py) for the block that begins at ``first``.

    Returns:
        (row_low, row_high, diagonal, distance, start, begin, end, stop): keys from ``begin`` to
        ``end`` are whole blocks that every row keeps; those from ``start`` to ``begin`` and from
        ``end`` to ``stop`` are ragged.
    """
    at = entries + index * 7
    row_low = tl.load(at)
    row_high = tl.load(at + 1)
    start = tl.load(at + 2)
    high = tl.load(at + 3)
    diagonal = tl.load(at + 4)
    distance = tl.load(at + 5)
    # Beyond the diagonal of the last row there is nothing to do; before that of the first,
    # nothing to ask.
    stop = tl.minimum(high, row_high + diagonal)
    clear = tl.minimum(high, first + diagonal + 1)
    if WINDOW:
        stop = tl.minimum(stop, row_high + distance + right)
        clear = tl.minimum(clear, first + distance + right + 1)
        start = tl.maximum(start, row_low + distance - left)
    stop = tl.maximum(stop, start)
    begin = start
    if WINDOW:
        # Whole blocks of keys that the window may cut on their left.
        ragged = tl.maximum(0, row_high - 1 + distance - left - start)
        begin = tl.minimum(start + tl.cdiv(ragged, BLOCK_N) * BLOCK_N, stop)
    whole = (row_low == first) & (row_high == tl.minimum(first + BLOCK_M, n_queries))
    if BITS:
        whole = whole & (tl.load(at + 6) == 0)
    clear = tl.where(whole, tl.maximum(clear, begin), begin)
    end = begin + (clear - begin) // BLOCK_N * BLOCK_N
    return row_low, row_high, diagonal, distance, start, begin, end, stop
