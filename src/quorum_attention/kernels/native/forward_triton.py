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

from quorum_attention.kernels.native.dropout_triton import load_dropout_params
from quorum_attention.kernels.native.tile_triton import (
    NOT_SPECIALIZED,
    block_rows,
    keys_kept,
    keys_of_run,
    lane_of,
    mask_bits_kept,
    modified,
    pairs_of_tile,
)


@triton.jit
def _tile(
    acc, m, l, q, key, value, b, h_k, at_key, k_n, v_n, inside, keep, apart, bias_at, bias_live,
    scale, log2_scale, softcap, slope, drop,
    P_EXPONENT: tl.constexpr, MASKED: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, BIAS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, READ: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    k = block_rows(key, b, h_k, at_key, k_n, inside, HEAD_DIM, BLOCK_N, BLOCK_D, READ, MASKED)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if not PLAIN:
        s, _ = modified(s, apart, bias_at, bias_live, scale, softcap, slope, SOFTCAP, ALIBI, BIAS)
        log2_scale = 1.4426950408889634
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * log2_scale)
    if MASKED or BIAS:
        # The maximum of a row without keys so far is -inf, and its differences would be NaN.
        below = P_EXPONENT - tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        below = P_EXPONENT - m_new
    p = tl.exp2(tl.fma(s, log2_scale, below[:, None]))
    alpha = tl.exp2(m - P_EXPONENT + below)
    l = l * alpha + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(drop != 0, 0.0, p)
    acc = acc * alpha[:, None]
    v = block_rows(value, b, h_k, at_key, v_n, inside, VALUE_DIM, BLOCK_N, BLOCK_DV, READ, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m_new, l


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(
    query, key, value, out, lse, starts, entries, bias, slopes, query_bits, key_bits, drops,
    heads, group, n_queries, n_keys, n_blocks, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    o_b, o_h, o_n, l_b, l_h, l_n, bias_b, bias_h, bias_q, bias_k, bias_row, bias_column,
    scale, softcap, left, right,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, P_EXPONENT: tl.constexpr, P_FACTOR: tl.constexpr,
    RESUME: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, WINDOW: tl.constexpr, BITS: tl.constexpr, READ: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Merge a task's runs into (out, lse), or write them there (RESUME False).

    query (b, h, n, d), key, value (b, hk, m, d or dv), out (b, h, n, dv) any floating dtype, lse
    (b, h, n) fp32; strides in elements, the last dimension contiguous. ``starts`` and ``entries``:
    a table from runs.py, by blocks of BLOCK_M queries. ``bias_row``, ``bias_column``: local
    positions of the mask's first row and column. ``group``: query heads of a key head. ``drops``:
    numbers from ``launch.dropout_numbers``, read with DROPOUT (see ``dropout_triton.dropped``).
    RAGGED: pipeline stages of ragged parts.
    BITS: 1: group bits; 2: ``query_bits`` are the mask bits of partial blocks (``mask_bits_kept``),
    and ``left`` and ``right`` their strides by entry and head.
    """
    program = tl.program_id(0)
    # The last blocks of a causal task take longest, so they start first.
    block = n_blocks - 1 - program % n_blocks
    lane = program // n_blocks
    b = (lane // heads).to(tl.int64)
    h = lane % heads
    h_k = (h // group).to(tl.int64)
    h = h.to(tl.int64)

    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < n_queries
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    # Offsets that may span a whole tensor have 64 bits.
    wide_rows = rows.to(tl.int64)
    query += b * q_b + h * q_h
    key = lane_of(key, b, h_k, k_b, k_h, READ)
    value = lane_of(value, b, h_k, v_b, v_h, READ)
    out += b * o_b + h * o_h
    lse += b * l_b + h * l_h
    q = tl.load(
        query + wide_rows[:, None] * q_n + d[None, :],
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    out_at = out + wide_rows[:, None] * o_n + dv[None, :]
    out_live = live[:, None] & (dv < VALUE_DIM)[None, :]
    lse_at = lse + wide_rows * l_n
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + h)
    if BIAS:
        bias += b * bias_b + h * bias_h

    mask_bits = query_bits
    if BITS == 2:
        mask_bits += b * left + h * right

    head, entry, key_low, key_high, threshold, share = 0, 0, 0, 0, 0, 1.0
    if DROPOUT:
        head, entry, key_low, key_high, threshold, rescale, share = load_dropout_params(drops, h, b)

    if RESUME:
        old = tl.load(lse_at, mask=live, other=float("-inf"))
        m = old * 1.4426950408889634
        # P is computed times 2**P_EXPONENT, so that small ones do not underflow in 16 bits.
        l = tl.where(old == float("-inf"), 0.0, P_FACTOR)
        acc = tl.load(out_at, mask=out_live, other=0.0).to(tl.float32) * P_FACTOR
        if DROPOUT:
            # As it is summed up: without the factor of what is not dropped.
            acc = acc * share
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    columns = tl.arange(0, BLOCK_N)
    log2_scale = scale * 1.4426950408889634

    for index in range(tl.load(starts + block), tl.load(starts + block + 1)):
        row_low, row_high, diagonal, distance, start, begin, end, stop = keys_of_run(
            entries, index, first, n_queries, left, right, BLOCK_M, BLOCK_N, WINDOW, BITS,
            8 if DROPOUT else (8 if BITS == 2 else 7),
        )  # fmt: skip
        shift = 0
        if DROPOUT:
            shift = tl.load(entries + index * 8 + 7)

        for at_key in tl.range(begin, end, BLOCK_N):
            apart, bias_at, drop = pairs_of_tile(
                rows, wide_rows, at_key, columns, distance, shift, bias, bias_row, bias_column,
                bias_q, bias_k, head, entry, key_low, key_high, threshold, BLOCK_M, BLOCK_N,
                BIAS, DROPOUT,
            )  # fmt: skip
            acc, m, l = _tile(
                acc, m, l, q, key, value, b, h_k, at_key, k_n, v_n, True, True, apart, bias_at,
                live[:, None], scale, log2_scale, softcap, slope, drop, P_EXPONENT, False, PLAIN,
                SOFTCAP, ALIBI, BIAS, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, READ,
                PRECISION, DROPOUT,
            )  # fmt: skip

        # The ragged parts: after the clear part, and before it (a window's left edge).
        for side in range(2 if WINDOW else 1):
            part_low = tl.where(side == 1, start, end)
            part_high = tl.where(side == 1, begin, stop)
            for at_key in tl.range(part_low, part_high, BLOCK_N, num_stages=RAGGED):
                keys = at_key + columns
                keep = keys_kept(
                    rows[:, None], keys[None, :], row_low, row_high, part_low, part_high,
                    diagonal, distance, left, right, WINDOW,
                )  # fmt: skip
                if BITS == 2:
                    keep = mask_bits_kept(
                        keep, mask_bits, entries + index * 8, rows[:, None], keys[None, :],
                    )  # fmt: skip
                if BITS == 1:
                    # Read again for each tile: holding them would cost the clear tiles registers.
                    own_bits = tl.load(query_bits + rows, mask=live, other=0)
                    other = tl.load(key_bits + keys, mask=keys < part_high, other=0)
                    keep = keep & ((own_bits[:, None] & other[None, :]) == 0)
                apart, bias_at, drop = pairs_of_tile(
                    rows, wide_rows, at_key, columns, distance, shift, bias, bias_row, bias_column,
                    bias_q, bias_k, head, entry, key_low, key_high, threshold, BLOCK_M, BLOCK_N,
                    BIAS, DROPOUT,
                )  # fmt: skip
                acc, m, l = _tile(
                    acc, m, l, q, key, value, b, h_k, at_key, k_n, v_n, keys < part_high, keep,
                    apart, bias_at, keep, scale, log2_scale, softcap, slope, drop, P_EXPONENT, True,
                    PLAIN, SOFTCAP, ALIBI, BIAS, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
                    READ, PRECISION, DROPOUT,
                )  # fmt: skip

    fully_masked = l == 0.0
    total = tl.where(fully_masked, 1.0, l)
    acc = acc / total[:, None]
    if DROPOUT:
        acc = acc * rescale
    result = (m + tl.log2(total) - P_EXPONENT) * 0.6931471805599453
    result = tl.where(fully_masked, float("-inf"), result)
    # Warps share rows: all must have read the old state before one of them overwrites it.
    tl.debug_barrier()
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=out_live)
    tl.store(lse_at, result, mask=live)
