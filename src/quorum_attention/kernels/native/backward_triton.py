# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""The backward of a whole task: first by blocks of queries (dQ), then by blocks of keys (dK, dV).

With the global lse, P = exp(S - lse) and delta = rowsum(dO * O) (paper, section 3):

    dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale dS K,   dK = scale dS^T Q.

P is computed twice, so that no two programs add to the same number: the result is bit-for-bit
repeatable. For fp16, P is computed times 2**p_exponent, and dS times a power of two for each key
head, its ``ds_scale``, which follows from the largest norms of its rows. So both stay in fp16's
normal range and cannot overflow (design, section 2).
"""

import triton
import triton.language as tl

from quorum_attention.kernels.native.dropout_triton import dropped, load_dropout_params
from quorum_attention.kernels.native.tile_triton import (
    NOT_SPECIALIZED,
    block_rows,
    kept,
    keys_kept,
    keys_of_run,
    lane_of,
    mask_bits_kept,
    modified,
    pairs_of_tile,
    rows_of_run,
)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def norm_kernel(
    value, norms, heads, n_rows, v_b, v_h, v_n, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Norms (b, hk) = the largest squared norm of a row of value (b, hk, m, dv)."""
    n_blocks = tl.cdiv(n_rows, BLOCK)
    program = tl.program_id(0)
    lane = program // n_blocks
    rows = (program % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    dv = tl.arange(0, BLOCK_DV)
    b = (lane // heads).to(tl.int64)
    h = (lane % heads).to(tl.int64)
    at = value + b * v_b + h * v_h + rows.to(tl.int64)[:, None] * v_n + dv[None, :]
    live = (rows < n_rows)[:, None] & (dv < VALUE_DIM)[None, :]
    v = tl.load(at, mask=live, other=0.0).to(tl.float32)
    tl.atomic_max(norms + lane, _largest(v))


@triton.jit
def _largest(rows):
    """The largest squared norm of the rows that are finite: others are so however they are scaled,
    and would scale the rest to 0. (The comparison is false for NaN, too.)"""
    squares = tl.sum(rows * rows, 1)
    return tl.max(tl.where(squares < float("inf"), squares, 0.0), 0)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def delta_kernel(
    grad_out, out, delta, norms, heads, group, n_rows, g_b, g_h, g_n, o_b, o_h, o_n,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Delta (b, h, n) = rowsum(grad_out * out), and the norms (b, hk) of grad_out."""
    n_blocks = tl.cdiv(n_rows, BLOCK)
    program = tl.program_id(0)
    lane = program // n_blocks
    rows = (program % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    wide = rows.to(tl.int64)
    dv = tl.arange(0, BLOCK_DV)
    b = (lane // heads).to(tl.int64)
    h = (lane % heads).to(tl.int64)
    live = rows < n_rows
    cells = live[:, None] & (dv < VALUE_DIM)[None, :]
    g = tl.load(
        grad_out + b * g_b + h * g_h + wide[:, None] * g_n + dv[None, :], mask=cells, other=0.0
    ).to(tl.float32)
    o = tl.load(out + b * o_b + h * o_h + wide[:, None] * o_n + dv[None, :], mask=cells, other=0.0)
    found = tl.sum(g * o.to(tl.float32), 1)
    tl.store(delta + lane.to(tl.int64) * n_rows + wide, found, mask=live)
    if NORMS:
        tl.atomic_max(norms + lane // group, _largest(g))


@triton.jit
def _ds_scale(norms, lane, lanes, largest):
    """A key head's power of two for dS: it keeps 2**largest |dS| <= 2**(largest + 1) g v near
    2**14."""
    g2 = tl.load(norms + lane)
    v2 = tl.load(norms + lanes + lane)
    bound = 0.5 * (tl.log2(tl.maximum(g2, 1e-30)) + tl.log2(tl.maximum(v2, 1e-30))) + 1.0 + largest
    return tl.exp2(tl.minimum(tl.maximum(tl.floor(14.0 - bound), -60.0), 60.0))


@triton.jit
def _query_tile(
    dq, q, do, lse2, delta, ds_scale, key, value, b, h_k, at_key, k_n, v_n, inside, keep, apart,
    bias_at, bias_live, scale, log2_scale, softcap, slope, drop, rescale,
    MASKED: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, READ: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    k = block_rows(key, b, h_k, at_key, k_n, inside, HEAD_DIM, BLOCK_N, BLOCK_D, READ, MASKED)
    v = block_rows(value, b, h_k, at_key, v_n, inside, VALUE_DIM, BLOCK_N, BLOCK_DV, READ, MASKED)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    softcap_grad = 1.0
    if not PLAIN:
        s, softcap_grad = modified(
            s, apart, bias_at, bias_live, scale, softcap, slope, SOFTCAP, ALIBI, BIAS
        )
        log2_scale = 1.4426950408889634
    p = tl.exp2(s * log2_scale - lse2[:, None])
    if MASKED:
        p = tl.where(keep, p, 0.0)
    if DROPOUT:
        dp = tl.where(drop != 0, 0.0, dp * rescale)
    ds = p * (dp * ds_scale - delta[:, None]) * softcap_grad
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def query_kernel(
    query, key, value, grad_out, lse, delta, norms, grad_query, starts, entries, bias, slopes,
    query_bits, key_bits, drops, heads, group, n_queries, n_keys, n_blocks, key_lanes,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, l_b, l_h, l_n, dq_b, dq_h, dq_n,
    bias_b, bias_h, bias_q, bias_k, bias_row, bias_column,
    scale, softcap, left, right, p_exponent, p_unscale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE_DS: tl.constexpr, ADD: tl.constexpr,
    PLAIN: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, BIAS: tl.constexpr, WINDOW: tl.constexpr, BITS: tl.constexpr,
    READ: tl.constexpr, PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Add a task's dQ (b, h, n, d) to ``grad_query``, or write it there (ADD False).

    ``starts`` and ``entries``: by blocks of BLOCK_M queries. ``norms`` (2, b * hk): squared norms
    of grad_out and of value, read where SCALE_DS. RAGGED: pipeline stages of ragged parts. BITS:
    see ``forward_kernel``.
    """
    program = tl.program_id(0)
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
    columns = tl.arange(0, BLOCK_N)
    wide_rows = rows.to(tl.int64)
    k_wide = (d < HEAD_DIM)[None, :]
    v_wide = (dv < VALUE_DIM)[None, :]
    query += b * q_b + h * q_h
    key = lane_of(key, b, h_k, k_b, k_h, READ)
    value = lane_of(value, b, h_k, v_b, v_h, READ)
    q = tl.load(
        query + wide_rows[:, None] * q_n + d[None, :], mask=live[:, None] & k_wide, other=0.0
    )
    do = tl.load(
        grad_out + b * g_b + h * g_h + wide_rows[:, None] * g_n + dv[None, :],
        mask=live[:, None] & v_wide,
        other=0.0,
    )
    own = tl.load(lse + b * l_b + h * l_h + wide_rows * l_n, mask=live, other=float("-inf"))
    # In a row without any key, +inf in place of -inf makes its probabilities 0 instead of NaN.
    lse2 = tl.where(own == float("-inf"), float("inf"), own * 1.4426950408889634 - p_exponent)
    d_row = tl.load(delta + lane.to(tl.int64) * n_queries + wide_rows, mask=live, other=0.0)
    head, entry, key_low, key_high, threshold, rescale = 0, 0, 0, 0, 0, 1.0
    largest = p_exponent
    if DROPOUT:
        head, entry, key_low, key_high, threshold, rescale, _ = load_dropout_params(drops, h, b)
        # dS is larger by the factor of what is not dropped.
        largest = p_exponent + tl.log2(tl.maximum(rescale, 1.0))
    ds_scale = 1.0
    if SCALE_DS:
        ds_scale = _ds_scale(norms, (lane // heads) * (heads // group) + (lane % heads) // group,
                     key_lanes, largest)  # fmt: skip
        d_row = d_row * ds_scale
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + h)
    if BIAS:
        bias += b * bias_b + h * bias_h
    mask_bits = query_bits
    if BITS == 2:
        mask_bits += b * left + h * right
    log2_scale = scale * 1.4426950408889634
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

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
            dq = _query_tile(
                dq, q, do, lse2, d_row, ds_scale, key, value, b, h_k, at_key, k_n, v_n, True, True,
                apart, bias_at, live[:, None], scale, log2_scale, softcap, slope, drop, rescale,
                False, PLAIN, SOFTCAP, ALIBI, BIAS, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV,
                BLOCK_N, READ, PRECISION, DROPOUT,
            )  # fmt: skip

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
                dq = _query_tile(
                    dq, q, do, lse2, d_row, ds_scale, key, value, b, h_k, at_key, k_n, v_n,
                    keys < part_high, keep, apart, bias_at, keep, scale, log2_scale, softcap,
                    slope, drop, rescale, True, PLAIN, SOFTCAP, ALIBI, BIAS, HEAD_DIM, VALUE_DIM,
                    BLOCK_D, BLOCK_DV, BLOCK_N, READ, PRECISION, DROPOUT,
                )  # fmt: skip

    dq = dq * (scale / ds_scale * p_unscale)
    dq_at = grad_query + b * dq_b + h * dq_h + wide_rows[:, None] * dq_n + d[None, :]
    cells = live[:, None] & k_wide
    if ADD:
        dq += tl.load(dq_at, mask=cells, other=0.0).to(tl.float32)
    tl.store(dq_at, dq.to(grad_query.dtype.element_ty), mask=cells)


@triton.jit
def _pairs_of_tile(
    rows, tile_rows, wide_row, keys, wide_keys, first, distance, shift, bias, bias_row, bias_column,
    bias_q, bias_k, head, entry, key_low, key_high, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """``pairs_of_tile`` of a tile (keys, rows)."""
    apart = rows[None, :] - keys[:, None] + distance
    if BIAS:
        bias += (wide_row - bias_row + tile_rows)[None, :] * bias_q + (
            wide_keys[:, None] - bias_column
        ) * bias_k
    drop = 0
    if DROPOUT:
        drop = dropped(
            rows + shift, first + shift - distance, head, entry, key_low, key_high, threshold,
            BLOCK_M, BLOCK_N, DROPOUT, True,
        )  # fmt: skip
    return apart, bias, drop


@triton.jit
def _key_tile(
    dk, dv, k, v, query, grad_out, b, h, at_row, q_n, g_n, lse_at, delta_at, inside, keep,
    apart, bias_at, bias_live, ds_scale, scale, log2_scale, softcap, slope, p_exponent, drop,
    rescale,
    MASKED: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, READ: tl.constexpr, PRECISION: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    q = block_rows(query, b, h, at_row, q_n, inside, HEAD_DIM, BLOCK_M, BLOCK_D, READ, MASKED)
    do = block_rows(grad_out, b, h, at_row, g_n, inside, VALUE_DIM, BLOCK_M, BLOCK_DV, READ, MASKED)
    if MASKED:
        own = tl.load(lse_at, mask=inside, other=float("-inf"))
        delta = tl.load(delta_at, mask=inside, other=0.0)
    else:
        own = tl.load(lse_at)
        delta = tl.load(delta_at)
    lse2 = tl.where(own == float("-inf"), float("inf"), own * 1.4426950408889634 - p_exponent)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    softcap_grad = 1.0
    if not PLAIN:
        s, softcap_grad = modified(
            s, apart, bias_at, bias_live, scale, softcap, slope, SOFTCAP, ALIBI, BIAS
        )
        log2_scale = 1.4426950408889634
    p = tl.exp2(s * log2_scale - lse2[None, :])
    if MASKED:
        p = tl.where(keep, p, 0.0)
    weights = p
    if DROPOUT:
        gone = drop != 0
        weights = tl.where(gone, 0.0, p)
    dv = tl.dot(weights.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    if DROPOUT:
        dp = tl.where(gone, 0.0, dp * rescale)
    ds = p * (dp * ds_scale - (delta * ds_scale)[None, :]) * softcap_grad
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def key_kernel(
    query, key, value, grad_out, lse, delta, norms, grad_key, grad_value, starts,
    entries, bias, slopes, query_bits, key_bits, drops, key_heads, group, n_queries, n_keys,
    n_blocks, key_lanes,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n, l_b, l_h, l_n,
    dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    bias_b, bias_h, bias_q, bias_k, bias_row, bias_column,
    scale, softcap, left, right, p_exponent, p_unscale,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE_DS: tl.constexpr, ADD: tl.constexpr,
    PLAIN: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, BIAS: tl.constexpr, WINDOW: tl.constexpr,
    BITS: tl.constexpr, READ: tl.constexpr, PRECISION: tl.constexpr, DROPOUT: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Add a task's dK (b, hk, m, d) and dV (b, hk, m, dv), or write them (ADD False).

    ``starts`` and ``entries``: by blocks of BLOCK_N keys. One program runs the query heads of a
    key head one after the other.
    """
    program = tl.program_id(0)
    # The first blocks of a causal task take longest, so they start first.
    block = program % n_blocks
    lane = program // n_blocks
    b = (lane // key_heads).to(tl.int64)
    h_k = (lane % key_heads).to(tl.int64)

    first = block * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    live = keys < n_keys
    d = tl.arange(0, BLOCK_D)
    dv_columns = tl.arange(0, BLOCK_DV)
    tile_rows = tl.arange(0, BLOCK_M)
    wide_keys = keys.to(tl.int64)
    k_wide = (d < HEAD_DIM)[None, :]
    v_wide = (dv_columns < VALUE_DIM)[None, :]
    k = tl.load(
        key + b * k_b + h_k * k_h + wide_keys[:, None] * k_n + d[None, :],
        mask=live[:, None] & k_wide,
        other=0.0,
    )
    v = tl.load(
        value + b * v_b + h_k * v_h + wide_keys[:, None] * v_n + dv_columns[None, :],
        mask=live[:, None] & v_wide,
        other=0.0,
    )
    entry, key_low, key_high, threshold, rescale = 0, 0, 0, 0, 1.0
    largest = p_exponent
    if DROPOUT:
        _, entry, key_low, key_high, threshold, rescale, _ = load_dropout_params(drops, h_k, b)
        largest = p_exponent + tl.log2(tl.maximum(rescale, 1.0))
    ds_scale = 1.0
    if SCALE_DS:
        ds_scale = _ds_scale(norms, lane, key_lanes, largest)
    log2_scale = scale * 1.4426950408889634
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    for member in range(group):
        h = h_k * group + member
        query_h = lane_of(query, b, h, q_b, q_h, READ)
        grad_h = lane_of(grad_out, b, h, g_b, g_h, READ)
        lse_h = lse + b * l_b + h * l_h
        delta_h = delta + (b * key_heads * group + h) * n_queries
        mask_bits = query_bits
        if BITS == 2:
            mask_bits += b * left + h * right
        head = 0
        if DROPOUT:
            head = (tl.load(drops + 3) + h).to(tl.uint32)
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + h)
        bias_h_at = bias
        if BIAS:
            bias_h_at += b * bias_b + h * bias_h
        for index in range(tl.load(starts + block), tl.load(starts + block + 1)):
            at = entries + index * (8 if DROPOUT else (8 if BITS == 2 else 7))
            column_low = tl.load(at + 2)
            column_high = tl.load(at + 3)
            diagonal = tl.load(at + 4)
            distance = tl.load(at + 5)
            start, begin, end, stop = rows_of_run(
                entries, index, first, n_keys, left, right, BLOCK_M, BLOCK_N, WINDOW, BITS,
                8 if DROPOUT else (8 if BITS == 2 else 7),
            )  # fmt: skip
            shift = 0
            if DROPOUT:
                shift = tl.load(at + 7)

            for at_row in tl.range(begin, end, BLOCK_M):
                wide_row = tl.cast(at_row, tl.int64)
                rows = at_row + tile_rows
                apart, bias_at, drop = _pairs_of_tile(
                    rows, tile_rows, wide_row, keys, wide_keys, first, distance, shift,
                    bias_h_at, bias_row, bias_column, bias_q, bias_k, head, entry, key_low,
                    key_high, threshold, BLOCK_M, BLOCK_N, BIAS, DROPOUT,
                )  # fmt: skip
                dk, dv = _key_tile(
                    dk, dv, k, v, query_h, grad_h, b, h, at_row, q_n, g_n,
                    lse_h + (wide_row + tile_rows) * l_n, delta_h + wide_row + tile_rows, True,
                    True, apart, bias_at, live[:, None], ds_scale, scale, log2_scale, softcap,
                    slope, p_exponent, drop, rescale, False, PLAIN, SOFTCAP, ALIBI, BIAS, HEAD_DIM,
                    VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, READ, PRECISION, DROPOUT,
                )  # fmt: skip

            # The ragged parts: before the clear part (at the diagonal), and after it.
            for side in range(2):
                part_low = tl.where(side == 1, end, start)
                part_high = tl.where(side == 1, stop, begin)
                for at_row in tl.range(part_low, part_high, BLOCK_M, num_stages=RAGGED):
                    wide_row = tl.cast(at_row, tl.int64)
                    rows = at_row + tile_rows
                    keep = kept(
                        rows[None, :], keys[:, None], part_low, part_high, column_low,
                        column_high, diagonal, distance, left, right, WINDOW,
                    )  # fmt: skip
                    if BITS == 2:
                        keep = mask_bits_kept(keep, mask_bits, at, rows[None, :], keys[:, None])
                    if BITS == 1:
                        own_bits = tl.load(key_bits + keys, mask=live, other=0)
                        other = tl.load(query_bits + rows, mask=rows < part_high, other=0)
                        keep = keep & ((own_bits[:, None] & other[None, :]) == 0)
                    apart, bias_at, drop = _pairs_of_tile(
                        rows, tile_rows, wide_row, keys, wide_keys, first, distance, shift,
                        bias_h_at, bias_row, bias_column, bias_q, bias_k, head, entry, key_low,
                        key_high, threshold, BLOCK_M, BLOCK_N, BIAS, DROPOUT,
                    )  # fmt: skip
                    dk, dv = _key_tile(
                        dk, dv, k, v, query_h, grad_h, b, h, at_row, q_n, g_n,
                        lse_h + (wide_row + tile_rows) * l_n, delta_h + wide_row + tile_rows,
                        rows < part_high, keep, apart, bias_at, keep, ds_scale, scale, log2_scale,
                        softcap, slope, p_exponent, drop, rescale, True, PLAIN, SOFTCAP, ALIBI,
                        BIAS, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, READ, PRECISION,
                        DROPOUT,
                    )  # fmt: skip

    dk = dk * (scale / ds_scale * p_unscale)
    dv = dv * p_unscale
    if DROPOUT:
        dv = dv * rescale
    dk_at = grad_key + b * dk_b + h_k * dk_h + wide_keys[:, None] * dk_n + d[None, :]
    dv_at = grad_value + b * dv_b + h_k * dv_h + wide_keys[:, None] * dv_n + dv_columns[None, :]
    k_cells = live[:, None] & k_wide
    v_cells = live[:, None] & v_wide
    if ADD:
        dk += tl.load(dk_at, mask=k_cells, other=0.0).to(tl.float32)
        dv += tl.load(dv_at, mask=v_cells, other=0.0).to(tl.float32)
    tl.store(dk_at, dk.to(grad_key.dtype.element_ty), mask=k_cells)
    tl.store(dv_at, dv.to(grad_value.dtype.element_ty), mask=v_cells)
