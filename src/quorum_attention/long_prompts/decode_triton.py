# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""Attention of a few rows over many keys as Triton kernels ("flash decoding").

``attend_splits_kernel`` gives each program a run of keys, a split, so that a few rows
keep a whole GPU busy. ``merge_splits_kernel`` merges the results of all splits, of
several segments too.
"""

import triton
import triton.language as tl


@triton.jit
def _capped(scores, softcap):
    """Cap scores in units of log 2: tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    ratio = scores * 0.6931471805599453 / softcap
    capped = softcap * (1.0 - 2.0 / (tl.exp(2.0 * ratio) + 1.0))
    return capped * 1.4426950408889634


@triton.jit
def _finite(highest):
    """Replace -inf, of rows without a key so far: the difference of two of those is
    NaN."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _store_statistics(
    out,
    lse,
    row,
    is_row,
    highest,
    total,
    summed,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
):
    """Normalise and store the statistics of rows; ``highest`` is in units of log 2."""
    column = tl.arange(0, BLOCK_VALUE_DIM)
    has_keys = total > 0.0
    divisor = tl.where(has_keys, total, 1.0)
    row_at = out + row[:, None] * VALUE_DIM
    is_cell = is_row[:, None] & (column < VALUE_DIM)[None, :]
    result = summed / divisor[:, None]
    tl.store(row_at + column[None, :], result, mask=is_cell)
    log_total = highest + tl.log2(divisor)
    log_total = log_total * 0.6931471805599453
    log_total = tl.where(has_keys, log_total, float("-inf"))
    tl.store(lse + row, log_total, mask=is_row)


@triton.jit(
    do_not_specialize=[
        "n_keys",
        "start",
        "first_position",
        "window",
        "first_split",
        "n_rows",
        "n_queries",
        "rows_per_entry",
        "heads",
        "share",
        "padding_b",
    ]
)
def attend_splits_kernel(
    query,
    key,
    value,
    padding,
    out,
    lse,
    scale_log2,
    softcap,
    n_keys,
    start,
    first_position,
    window,
    first_split,
    split_keys,
    n_rows,
    n_queries,
    rows_per_entry,
    heads,
    share,
    key_b,
    key_h,
    key_n,
    value_b,
    value_h,
    value_n,
    padding_b,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from rows (b, h, n_rows, d) over one split of keys (b, h, n_keys, d).

    Writes out (splits, b, h, n_rows, d_v) and lse (splits, b, h, n_rows), both fp32.
    Row r is query ``r % n_queries`` of batch entry ``r // rows_per_entry``.
    """
    split = tl.program_id(0)
    head_index = tl.program_id(1).to(tl.int64)
    b = head_index // heads
    h = head_index % heads
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < n_rows
    column = tl.arange(0, BLOCK_DIM)
    value_column = tl.arange(0, BLOCK_VALUE_DIM)
    key += b * key_b + h * key_h
    value += b * value_b + h * value_h
    query_at = query + (head_index * n_rows + row[:, None]) * DIM + column[None, :]
    tile = tl.load(query_at, mask=is_row[:, None] & (column < DIM)[None, :], other=0.0)
    position = first_position + row % n_queries
    entry = b * share + row // rows_per_entry

    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    summed = tl.zeros([BLOCK_ROWS, BLOCK_VALUE_DIM], tl.float32)
    stop = tl.minimum(n_keys, (split + 1) * split_keys)
    for first in range(split * split_keys, stop, BLOCK_KEYS):
        at = first + tl.arange(0, BLOCK_KEYS)
        is_key = at < stop
        key_at = key + at.to(tl.int64)[None, :] * key_n + column[:, None]
        keys = tl.load(
            key_at, mask=is_key[None, :] & (column < DIM)[:, None], other=0.0
        )
        value_at = value + at.to(tl.int64)[:, None] * value_n + value_column[None, :]
        value_cells = is_key[:, None] & (value_column < VALUE_DIM)[None, :]
        values = tl.load(value_at, mask=value_cells, other=0.0)
        scores = tl.dot(tile, keys, input_precision=PRECISION) * scale_log2
        if HAS_SOFTCAP:
            scores = _capped(scores, softcap)
        is_kept = is_row[:, None] & is_key[None, :]
        if IS_CAUSAL:
            is_kept &= (start + at)[None, :] <= position[:, None]
        if HAS_WINDOW:
            is_kept &= (start + at)[None, :] > (position - window)[:, None]
        if HAS_PADDING:
            padding_at = (
                padding
                + entry.to(tl.int64)[:, None] * padding_b
                + (start + at)[None, :]
            )
            is_kept &= tl.load(padding_at, mask=is_kept, other=0) != 0
        scores = tl.where(is_kept, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = _finite(new_highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None]
        summed += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        highest = new_highest

    _store_statistics(
        out,
        lse,
        ((first_split + split) * tl.num_programs(1) + head_index) * n_rows + row,
        is_row,
        highest,
        total,
        summed,
        VALUE_DIM,
        BLOCK_VALUE_DIM,
    )


@triton.jit(do_not_specialize=["n_splits", "n_rows"])
def merge_splits_kernel(
    out,
    lse,
    merged_out,
    merged_lse,
    n_splits,
    n_rows,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Merge (splits, rows, d_v) and (splits, rows) to (rows, d_v) and (rows,), one row
    each."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_VALUE_DIM)
    highest = float("-inf")
    total = 0.0
    summed = tl.zeros([BLOCK_VALUE_DIM], tl.float32)
    for first in range(0, n_splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        is_split = split < n_splits
        at = split.to(tl.int64) * n_rows + row
        logs = tl.load(lse + at, mask=is_split, other=float("-inf"))
        is_cell = is_split[:, None] & (column < VALUE_DIM)[None, :]
        part_at = out + at[:, None] * VALUE_DIM
        parts = tl.load(part_at + column[None, :], mask=is_cell, other=0.0)
        new_highest = tl.maximum(highest, tl.max(logs, 0))
        base = _finite(new_highest)
        weights = tl.exp(logs - base)
        shrink = tl.exp(highest - base)
        total = total * shrink + tl.sum(weights, 0)
        summed = summed * shrink + tl.sum(weights[:, None] * parts, 0)
        highest = new_highest
    has_keys = total > 0.0
    divisor = tl.where(has_keys, total, 1.0)
    result = summed / divisor
    out_at = merged_out + row * VALUE_DIM + column
    tl.store(out_at, result, mask=column < VALUE_DIM)
    log_total = tl.where(has_keys, highest + tl.log(divisor), float("-inf"))
    tl.store(merged_lse + row, log_total)
