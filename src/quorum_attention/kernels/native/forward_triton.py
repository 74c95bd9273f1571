# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""The forward of a whole task in one launch.

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
from quorum_attention.kernels.native.tile_triton import (
    NOT_SPECIALIZED,
    block_rows,
    cells,
    lane_of,
    modified,
    rows_at,
    walk,
)


@triton.jit
def _tile(state, own, keys, tile, K: tl.constexpr, MASKED: tl.constexpr):
    acc, m, l = state
    key, value, lane, k_n, v_n, scores = keys
    at_key, some, inside, keep, pairs, live = tile
    k = block_rows(key, lane, (at_key, some, k_n, inside), K.HEAD_DIM, K, MASKED)
    s = tl.dot(own, tl.trans(k), input_precision=K.PRECISION)
    log2_scale = scores[1]
    if not K.PLAIN:
        s, _ = modified(s, scores, pairs, live, K)
        log2_scale = 1.4426950408889634
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * log2_scale)
    if MASKED or K.BIAS:
        # The maximum of a row without keys so far is -inf, and its differences would be NaN.
        below = K.P_EXPONENT - tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        below = K.P_EXPONENT - m_new
    p = tl.exp2(tl.fma(s, log2_scale, below[:, None]))
    alpha = tl.exp2(m - K.P_EXPONENT + below)
    l = l * alpha + tl.sum(p, 1)
    if K.DROPOUT:
        p = tl.where(pairs[2] != 0, 0.0, p)
    acc = acc * alpha[:, None]
    v = block_rows(value, lane, (at_key, some, v_n, inside), K.VALUE_DIM, K, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=K.PRECISION)
    return acc, m_new, l


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    query, key, value, out, lse, starts, entries, bias, slopes, own_bits, key_bits,
    heads, group, n_queries, n_blocks, q_s, k_s, v_s, o_s, l_s,
    seed_low, seed_high, threshold, first_head, first_entry, repeat, rescale, share,
    bias_s, bias_row, bias_column, scale, softcap, left, right,
    RESUME: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Merge a task's runs into (out, lse), or write them there (RESUME False).

    query (b, h, n, d), key, value (b, hk, m, d or dv), out (b, h, n, dv) any floating dtype, lse
    (b, h, n) fp32; strides (``_s``) in elements, the last dimension contiguous. ``starts`` and
    ``entries``: a table from runs.py, by blocks of BLOCK_M queries. ``bias_row``, ``bias_column``:
    local positions of the mask's first row and column. ``group``: query heads of a key head.
    ``seed_low`` to ``share``: see ``dropout_params``; read with DROPOUT.
    BITS: 1: group bits; 2: ``own_bits`` are the mask bits of partial blocks (``bits_kept``), and
    ``left`` and ``right`` their strides by entry and head.
    """
    program = tl.program_id(0)
    # The last blocks of a causal task take longest, so they start first.
    block = n_blocks - 1 - program % n_blocks
    b = (program // n_blocks // heads).to(tl.int64)
    h = program // n_blocks % heads
    lane, shared = (b, h.to(tl.int64)), (b, (h // group).to(tl.int64))
    P_FACTOR: tl.constexpr = 2.0**K.P_EXPONENT

    rows = block * K.BLOCK_M + tl.arange(0, K.BLOCK_M)
    live = rows < n_queries
    q = tl.load(
        rows_at(query, q_s, lane, rows, K.PADDED),
        mask=cells(rows, n_queries, K.HEAD_DIM, K.PADDED),
        other=0.0,
    )
    out_at = rows_at(out, o_s, lane, rows, K.PADDED)
    out_live = cells(rows, n_queries, K.VALUE_DIM, K.PADDED)
    lse_at = lse + lane[0] * l_s[0] + lane[1] * l_s[1] + rows.to(tl.int64) * l_s[2]
    slope = 0.0
    if K.ALIBI:
        slope = tl.load(slopes + h)
    if K.BIAS:
        bias += lane[0] * bias_s[0] + lane[1] * bias_s[1]
    if K.BITS == 2:
        own_bits += lane[0] * left + lane[1] * right
    chances = 0, 0, 0, 0, 0, 1.0, 1.0
    if K.DROPOUT:
        drops = seed_low, seed_high, threshold, first_head, first_entry, repeat, rescale, share
        chances = dropout_params(drops, lane[1], lane[0])

    if RESUME:
        old = tl.load(lse_at, mask=live, other=float("-inf"))
        m = old * 1.4426950408889634
        # P is computed times 2**P_EXPONENT, so that small ones do not underflow in 16 bits.
        l = tl.where(old == float("-inf"), 0.0, P_FACTOR)
        acc = tl.load(out_at, mask=out_live, other=0.0).to(tl.float32) * P_FACTOR
        if K.DROPOUT:
            # As it is summed up: without the factor of what is not dropped.
            acc = acc * chances[6]
    else:
        m = tl.full([K.BLOCK_M], float("-inf"), tl.float32)
        l = tl.full([K.BLOCK_M], 0.0, tl.float32)
        acc = tl.full([K.BLOCK_M, K.PADDED], 0.0, tl.float32)
    scores = scale, scale * 1.4426950408889634, softcap, slope
    keys = (
        lane_of(key, shared, k_s, K), lane_of(value, shared, v_s, K), shared, k_s[2], v_s[2], scores
    )  # fmt: skip
    mask = bias, bias_s[2], bias_s[3], bias_row, bias_column
    bits = own_bits, key_bits
    table = block, starts, entries, n_queries, (left, right), bits, (mask, chances), keys
    acc, m, l = walk((acc, m, l), q, table, _tile, False, K)

    fully_masked = l == 0.0
    total = tl.where(fully_masked, 1.0, l)
    acc = acc / total[:, None]
    if K.DROPOUT:
        acc = acc * chances[5]
    result = (m + tl.log2(total) - K.P_EXPONENT) * 0.6931471805599453
    result = tl.where(fully_masked, float("-inf"), result)
    # Warps share rows: all must have read the old state before one of them overwrites it.
    tl.debug_barrier()
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=out_live)
    tl.store(lse_at, result, mask=live)
