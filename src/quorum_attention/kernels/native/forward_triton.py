# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""The forward of a whole task, in one launch.

A program takes a block of query rows and walks its runs of key blocks. It holds (acc, m, l) in
registers: the running output before division, the running maximum in units of ln 2, and the running
sum (paper, section 3; the recurrence is FlashAttention-2's). It starts from the statistics that the
rows already have, which merges the task into them.

P is rounded to 16 bits where it meets the value, and not in l. That cancels in the largest P of a
row only if this is a power of two, but it is that times two to the rounding of m: where m is
thousands, a row of one key is one last place off its value.
"""

import triton
import triton.language as tl

from quorum_attention.kernels.native.dropout_triton import dropout_params
from quorum_attention.kernels.native.tiles_triton import (
    LOG2_E,
    NOT_SPECIALIZED,
    cells_there_are,
    load_block,
    load_rows,
    moving_rows,
    params_of_head,
    row_pointers,
    scores_of_products,
    walk,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _forward_tile(state, q, moving, tile, K: tl.constexpr, MASKED: tl.constexpr):
    acc, m, l = state
    key, value, lane, key_stride, value_stride, scores = moving
    first_key, keys, inside, keep, pairs, live = tile
    _, log2_scale, _, _ = scores
    _, _, is_dropped = pairs
    k_block = (first_key, keys, key_stride, inside)
    v_block = (first_key, keys, value_stride, inside)
    k = load_block(key, lane, k_block, K.HEAD_DIM, K, MASKED)
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
        # The maximum of a row without keys so far is -inf, and its differences would be NaN.
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
    v = load_block(value, lane, v_block, K.VALUE_DIM, K, MASKED)
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
    starts,
    entries,
    bias,
    slopes,
    mask_bits,
    heads,
    group,
    n_queries,
    n_blocks,
    query_strides,
    key_strides,
    value_strides,
    out_strides,
    lse_strides,
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
    RESUME: tl.constexpr,
    K: tl.constexpr,
):
    """Merge a task's runs into (out, lse), or write them there (RESUME False).

    Args:
        query, key, value: (b, h, n, d), (b, hk, m, d), (b, hk, m, dv), or descriptors of key and
            value; the last dimension contiguous.
        out: (b, h, n, dv), any floating dtype; the last dimension contiguous.
        lse: (b, h, n), fp32.
        starts, entries: a table from runs.py, by blocks of BLOCK_M queries.
        bias: additive mask, read with BIAS.
        slopes: (h,), fp32, read with ALIBI.
        mask_bits: the bits of partial blocks (``kept_by_bits``), read with BITS. Then
            ``window_left`` and ``window_right`` are their strides by batch entry and head.
        group: query heads of a key head.
        query_strides, ...: in elements, by batch entry, head and row; ``bias_strides`` by column
            too.
        seed_low, ..., share: see ``dropout_params``; read with DROPOUT.
        bias_row, bias_column: local positions of the mask's first row and column.
    """
    program = tl.program_id(0)
    # The last blocks of a causal task take longest, so they start first.
    block = n_blocks - 1 - program % n_blocks
    b = (program // n_blocks // heads).to(tl.int64)
    h = program // n_blocks % heads
    lane = (b, h.to(tl.int64))
    key_lane = (b, (h // group).to(tl.int64))
    P_FACTOR: tl.constexpr = 2.0**K.P_EXPONENT

    rows = block * K.BLOCK_M + tl.arange(0, K.BLOCK_M)
    live = rows < n_queries
    q = load_rows(query, query_strides, lane, rows, n_queries, K.HEAD_DIM, K.PADDED)
    out_pointers = row_pointers(out, out_strides, lane, rows, K.PADDED)
    out_live = cells_there_are(rows, n_queries, K.VALUE_DIM, K.PADDED)
    lse_entry_stride, lse_head_stride, lse_row_stride = lse_strides
    lse_of_head = lse + b * lse_entry_stride + lane[1] * lse_head_stride
    lse_pointers = lse_of_head + rows.to(tl.int64) * lse_row_stride
    words = (seed_low, seed_high, threshold, first_head, first_entry, rescale, share)
    dropout = dropout_params(words, lane[1], b, K)
    _, _, _, _, _, rescale, share = dropout
    if RESUME:
        lse_so_far = tl.load(lse_pointers, mask=live, other=float("-inf"))
        m = lse_so_far * LOG2_E
        # P is computed times 2**P_EXPONENT, so that small ones do not underflow in 16 bits.
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
    scores, head_bias, bits = params_of_head(
        lane,
        (scale, softcap, slopes),
        (bias, bias_strides, bias_row, bias_column),
        (mask_bits, window_left, window_right),
        K,
    )
    moving = (
        moving_rows(key, key_lane, key_strides, K),
        moving_rows(value, key_lane, value_strides, K),
        key_lane,
        key_strides[2],
        value_strides[2],
        scores,
    )
    table = (block, starts, entries, n_queries)
    masking = ((window_left, window_right), bits, head_bias, dropout)
    acc, m, l = walk((acc, m, l), q, moving, table, masking, _forward_tile, False, K)

    fully_masked = l == 0.0
    total = tl.where(fully_masked, 1.0, l)
    acc = acc / total[:, None]
    if K.DROPOUT:
        acc = acc * rescale
    result = (m + tl.log2(total) - K.P_EXPONENT) * LN_2
    result = tl.where(fully_masked, float("-inf"), result)
    # Warps share rows: all must have read the old state before one of them overwrites it.
    tl.debug_barrier()
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=out_live)
    tl.store(lse_pointers, result, mask=live)
