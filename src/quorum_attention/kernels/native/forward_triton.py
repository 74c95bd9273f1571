# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""The forward of a whole task, in one launch.

A program takes a block of query rows and walks its runs of key blocks. It holds (acc,
m, l) in registers: the running output before division, the running maximum in units of
ln 2, and the running sum (paper, section 3; the recurrence is FlashAttention-2's). It
starts from the statistics that the rows already have, which merges the task into them.

P is rounded to 16 bits where it meets the value, and not in l. That cancels in the
largest P of a row only if this is a power of two, but it is that times two to the
rounding of m: where m is thousands, a row of one key is one last place off its value.
"""

import triton
import triton.language as tl

from quorum_attention.kernels.native.tiles_triton import (
    LOG2_E,
    NOT_SPECIALIZED,
    block_of_program,
    cells_there_are,
    load_block,
    load_rows,
    lse_pointers,
    row_pointers,
    scores_of_products,
    walk_keys,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _forward_tile(state, q, moving, tile, K: tl.constexpr, MASKED: tl.constexpr):
    acc, m, l = state
    keys, values, scores = moving
    _, _, _, keep, pairs, live = tile
    _, log2_scale, _, _ = scores
    _, _, is_dropped = pairs
    k = load_block(keys, tile, K.HEAD_DIM, K, MASKED)
    k_transposed = tl.trans(k)
    s = tl.dot(q, k_transposed, input_precision=K.PRECISION)
    if not K.PLAIN:
        s, _ = scores_of_products(s, scores, pairs, live, K)
        log2_scale = LOG2_E
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    row_max = tl.max(s, 1)
    m_new = tl.maximum(m, row_max * log2_scale)
    if MASKED or K.BIAS:
        # The maximum of a row without keys so far is -inf, and its differences would be
        # NaN.
        has_no_key = m_new == float("-inf")
        minus_m = K.P_EXPONENT - tl.where(has_no_key, 0.0, m_new)
    else:
        minus_m = K.P_EXPONENT - m_new
    p = tl.exp2(tl.fma(s, log2_scale, minus_m[:, None]))
    alpha = tl.exp2(m - K.P_EXPONENT + minus_m)
    l = l * alpha + tl.sum(p, 1)
    if K.DROPOUT:
        p = tl.where(is_dropped != 0, 0.0, p)
    acc = acc * alpha[:, None]
    v = load_block(values, tile, K.VALUE_DIM, K, MASKED)
    p = p.to(v.dtype)
    acc = tl.dot(p, v, acc, input_precision=K.PRECISION)
    return acc, m_new, l


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    query,
    key,
    value,
    out,
    lse,
    query_strides,
    key_strides,
    value_strides,
    out_strides,
    lse_strides,
    starts,
    entries,
    bias,
    slopes,
    mask_bits,
    heads,
    group,
    n_queries,
    n_keys,
    n_blocks,
    seed_low,
    seed_high,
    threshold,
    first_head,
    first_entry,
    rescale,
    share,
    bias_strides,
    bias_row,
    bias_column,
    scale,
    softcap,
    window_left,
    window_right,
    K: tl.constexpr,
):
    """Merge a task's runs into (out, lse), or write them there (ADD False).

    Args:
        query, key, value: (b, h, n, d), (b, hk, m, d), (b, hk, m, dv), or descriptors
            of key and value; the last dimension contiguous.
        out: (b, h, n, dv), any floating dtype; the last dimension contiguous.
        lse: (b, h, n), fp32.
        query_strides, ...: in elements, by batch entry, head and row.
        starts, entries: a table from runs.py, by blocks of BLOCK_M queries.
        bias: additive mask, read with BIAS.
        slopes: (h,), fp32, read with ALIBI.
        mask_bits: the bits of partial blocks (``kept_by_bits``), read with BITS. Then
            ``window_left`` and ``window_right`` are their strides by batch entry and
            head.
        group: query heads of a key head.
        seed_low, ..., first_entry: see ``dropped_pairs``; read with DROPOUT.
        rescale, share: 1 / (1 - p) and 1 - p; read with DROPOUT.
        bias_strides: in elements, by batch entry, head, row and column.
        bias_row, bias_column: local positions of the mask's first row and column.
    """
    block, lane, key_lane = block_of_program(n_blocks, heads, group)
    P_FACTOR: tl.constexpr = 2.0**K.P_EXPONENT

    rows = block * K.BLOCK_M + tl.arange(0, K.BLOCK_M)
    live = rows < n_queries
    q = load_rows(query, query_strides, lane, rows, n_queries, K.HEAD_DIM, K.PADDED)
    out_pointers = row_pointers(out, out_strides, lane, rows, K.PADDED)
    out_live = cells_there_are(rows, n_queries, K.VALUE_DIM, K.PADDED)
    row_lse = lse_pointers(lse, lse_strides, lane, rows)
    dropout = (seed_low, seed_high, threshold, first_head, first_entry, lane)
    if K.ADD:
        lse_so_far = tl.load(row_lse, mask=live, other=float("-inf"))
        m = lse_so_far * LOG2_E
        # P is computed times 2**P_EXPONENT, so that small ones do not underflow in 16
        # bits.
        l = tl.where(lse_so_far == float("-inf"), 0.0, P_FACTOR)
        out_so_far = tl.load(out_pointers, mask=out_live, other=0.0)
        acc = out_so_far.to(tl.float32) * P_FACTOR
        if K.DROPOUT:
            # The sum goes on without the factor of pairs that are not dropped.
            acc = acc * share
    else:
        m = tl.full([K.BLOCK_M], float("-inf"), tl.float32)
        l = tl.full([K.BLOCK_M], 0.0, tl.float32)
        acc = tl.full([K.BLOCK_M, K.PADDED], 0.0, tl.float32)
    params = (
        (scale, softcap, slopes),
        (bias, bias_strides, bias_row, bias_column),
        (mask_bits, window_left, window_right),
    )
    state = (acc, m, l)
    lanes = (lane, key_lane)
    moving = (key, key_strides, value, value_strides)
    table = (block, starts, entries, n_queries)
    acc, m, l = walk_keys(
        state, q, lanes, moving, params, table, dropout, _forward_tile, K
    )

    fully_masked = l == 0.0
    total = tl.where(fully_masked, 1.0, l)
    acc = acc / total[:, None]
    if K.DROPOUT:
        acc = acc * rescale
    result = (m + tl.log2(total) - K.P_EXPONENT) * LN_2
    result = tl.where(fully_masked, float("-inf"), result)
    # Warps share rows: all must have read the old state before one of them overwrites
    # it.
    tl.debug_barrier()
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=out_live)
    tl.store(row_lse, result, mask=live)
