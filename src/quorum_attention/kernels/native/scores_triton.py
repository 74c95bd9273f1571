# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""Changes to the scores of a tile, in the forward and in both halves of the backward."""

import triton
import triton.language as tl


@triton.jit
def modified(
    s,
    apart,
    bias_at,
    bias_live,
    scale,
    softcap,
    slope,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS: tl.constexpr,
):
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
    slack = 1.0
    if SOFTCAP:
        # tanh from the exponential of a negative number, which cannot overflow.
        e = tl.exp(-2.0 * tl.abs(s) / softcap)
        t = (1.0 - e) / (1.0 + e)
        t = tl.where(s < 0, -t, t)
        s = softcap * t
        slack = 1.0 - t * t
    if ALIBI:
        s -= slope * tl.abs(apart).to(tl.float32)
    if BIAS:
        s += tl.load(bias_at, mask=bias_live, other=0.0).to(tl.float32)
    return s, slack


@triton.jit
def kept(
    rows,
    columns,
    row_low,
    row_high,
    column_low,
    column_high,
    diagonal,
    distance,
    left,
    right,
    WINDOW: tl.constexpr,
):
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
    rows,
    columns,
    row_low,
    row_high,
    column_low,
    column_high,
    diagonal,
    distance,
    left,
    right,
    WINDOW: tl.constexpr,
):
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
def tried(keep, words, at, rows, keys):
    """Which of the pairs ``keep`` are kept by the words of a run's block too, if it has any.

    Args:
        words: int32, of all blocks of a lane: 128 rows of four words, a bit for each key.
        at: the run's entry, whose column 6 says whether it is a tried block, and column 7 where its
            words begin.
        rows, keys: local positions, which the blocks divide at multiples of 128.
    """
    mixed = tl.load(at + 6)
    where = tl.load(at + 7) + (rows & 127) * 4 + ((keys & 127) >> 5)
    word = tl.load(words + where, mask=keep & (mixed != 0), other=0)
    bit = (word >> (keys & 31)) & 1
    return keep & ((bit != 0) | (mixed == 0))
