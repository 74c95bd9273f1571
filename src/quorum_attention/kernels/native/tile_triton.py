# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""One tile: the run it belongs to, the rows it reads, its scores, and which of its pairs are kept.

A run has a clear part, whose pairs need no test, and ragged parts at its ends. Rows are read in one
of three ways (READ): "pointers"; "descriptors", where the config says that they are faster; and
"wide": pointers with 64-bit offsets within a tile, for rows that are very far apart.
"""

import triton
import triton.language as tl

from quorum_attention.kernels.native.dropout_triton import dropped

NOT_SPECIALIZED = [
    "starts", "entries", "norms", "heads", "key_heads", "group", "key_lanes", "n_queries", "n_keys",
    "n_rows", "n_blocks", "left", "right", "bias_row", "bias_column",
]  # fmt: skip
"""Arguments of the kernels that would only make Triton compile again for other lengths."""


@triton.jit
def keys_of_run(
    entries, index, first, n_queries, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, BITS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
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
    entries, index, first, n_keys, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, BITS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
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


@triton.jit
def lane_of(source, b, h, stride_b, stride_h, READ: tl.constexpr):
    """Where a head begins; with a descriptor, the head is given in each load instead."""
    if READ == "descriptors":
        return source
    else:  # noqa: RET505
        return source + b * stride_b + h * stride_h


@triton.jit
def block_rows(
    source, b, h, at, stride, live, WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
    READ: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows ``at`` to ``at + ROWS`` of a head, (ROWS, PADDED); columns from WIDTH on are 0.

    Args:
        source: what ``lane_of`` returned.
        live: (ROWS,) which rows to read if MASKED, the others are 0. A descriptor ignores it: only
            rows beyond the tensor are 0.
    """
    if READ == "descriptors":
        return source.load([b.to(tl.int32), h.to(tl.int32), at, 0]).reshape(ROWS, PADDED)
    else:  # noqa: RET505
        columns = tl.arange(0, PADDED)
        rows = tl.arange(0, ROWS)
        if READ == "wide":
            rows = rows.to(tl.int64)
        # Offsets have 64 bits across a tensor, 32 within a tile.
        tile = rows[:, None] * stride + columns[None, :]
        pointers = source + tl.cast(at, tl.int64) * stride + tile
        if MASKED:
            return tl.load(pointers, mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0)
        elif WIDTH != PADDED:  # noqa: RET505
            return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def modified(
    s, apart, bias_at, bias_live, scale, softcap, slope, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Scores from products: scaled, then soft-capped, then ALiBi and the mask.

    Args:
        s: products (rows, columns).
        apart: global distance of query and key.
        bias_at, bias_live: pointers to the additive mask, and which of them to read.
        scale, softcap, slope: factor of the scores; bound of the soft cap; slope of ALiBi.

    Returns:
        scores, and the derivative of the soft cap (1 without one).
    """
    s = s * scale
    softcap_grad = 1.0
    if SOFTCAP:
        # tanh from the exponential of a negative number, which cannot overflow.
        e = tl.exp(-2.0 * tl.abs(s) / softcap)
        t = (1.0 - e) / (1.0 + e)
        t = tl.where(s < 0, -t, t)
        s = softcap * t
        softcap_grad = 1.0 - t * t
    if ALIBI:
        s -= slope * tl.abs(apart).to(tl.float32)
    if BIAS:
        s += tl.load(bias_at, mask=bias_live, other=0.0).to(tl.float32)
    return s, softcap_grad


@triton.jit
def kept(
    rows, columns, row_low, row_high, column_low, column_high, diagonal, distance, left, right,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Which pairs of a tile belong to a run; rows are queries, columns keys."""
    keep = (rows >= row_low) & (rows < row_high) & (columns >= column_low)
    # The difference is compared; a sum with the diagonal might not fit 32 bits.
    keep = keep & (columns < column_high) & (columns - rows <= diagonal)
    if WINDOW:
        apart = rows - columns
        keep = keep & (apart + distance <= left) & (apart + distance >= -right)
    return keep


@triton.jit
def keys_kept(
    rows, columns, row_low, row_high, column_low, column_high, diagonal, distance, left, right,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """``kept`` of rows (m, 1) and columns (1, n), by the first and last key of each row: two
    comparisons for a pair. (With the roles exchanged ``kept`` is quicker, docs/native.md.)"""
    # Sums with NO_DIAGONAL or UNLIMITED do not fit 32 bits; what they are cut off to does.
    wide = rows.to(tl.int64)
    high = tl.minimum(wide + diagonal + 1, column_high)
    low = column_low
    if WINDOW:
        high = tl.minimum(high, wide + distance + right + 1)
        low = tl.minimum(tl.maximum(wide + distance - left, column_low), column_high).to(tl.int32)
    inside = (rows >= row_low) & (rows < row_high)
    high = tl.where(inside, tl.maximum(high, column_low), column_low).to(tl.int32)
    return (columns >= low) & (columns < high)


@triton.jit
def mask_bits_kept(keep, mask_bits, at, rows, keys):
    """Which of the pairs ``keep`` are kept by the bits of a run's block too, if it has any.

    Args:
        mask_bits: int32, of all partial blocks of a lane: 128 rows of four words, a bit for each
            key.
        at: the run's entry, whose column 6 says whether it is a partial block, and column 7 where
            its bits begin.
        rows, keys: local positions, which the blocks divide at multiples of 128.
    """
    mixed = tl.load(at + 6)
    where = tl.load(at + 7) + (rows & 127) * 4 + ((keys & 127) >> 5)
    word = tl.load(mask_bits + where, mask=keep & (mixed != 0), other=0)
    bit = (word >> (keys & 31)) & 1
    return keep & ((bit != 0) | (mixed == 0))


@triton.jit
def pairs_of_tile(
    rows, wide_rows, at_key, columns, distance, shift, bias, bias_row, bias_column, bias_q, bias_k,
    head, entry, key_low, key_high, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """(global distances, pointers to the additive mask, dropped pairs) of a tile (rows, keys)."""
    apart = rows[:, None] - (at_key + columns)[None, :] + distance
    if BIAS:
        bias += (wide_rows[:, None] - bias_row) * bias_q + (
            tl.cast(at_key, tl.int64) - bias_column + columns
        )[None, :] * bias_k
    drop = 0
    if DROPOUT:
        drop = dropped(
            rows + shift, at_key + shift - distance, head, entry, key_low, key_high, threshold,
            BLOCK_M, BLOCK_N, DROPOUT, False,
        )  # fmt: skip
    return apart, bias, drop
