# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""The backward of a whole task: by blocks of queries (dQ), then by blocks of keys (dK,
dV).

With the global lse, P = exp(S - lse) and delta = rowsum(dO * O) (paper, section 3):

    dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale dS K,   dK = scale dS^T Q.

P is computed twice, so that no two programs add to the same number: the result is
bit-for-bit repeatable. For fp16, P is computed times 2**p_exponent, and dS times a
power of two for each key head, its ``ds_scale``, which follows from the largest norms
of its rows. So both stay in fp16's normal range and cannot overflow (design, section
2).
"""

import triton
import triton.language as tl

from quorum_attention.kernels.native.tiles_triton import (
    LOG2_E,
    NOT_SPECIALIZED,
    block_of_program,
    lane_of,
    load_block,
    load_rows,
    lse_pointers,
    params_of_head,
    rows_of_head,
    scores_of_products,
    store_rows,
    walk,
    walk_keys,
)


@triton.jit
def _ds_scale(norms, key_lane, key_lanes, p_exponent, rescale, K: tl.constexpr):
    """A key head's power of two for dS.

    It keeps 2**p_exponent |dS| <= 2**(p_exponent + 1) g v near 2**14. With dropout dS
    is larger by ``rescale``.
    """
    ds_scale = 1.0
    if K.SCALE_DS:
        exponent = p_exponent
        if K.DROPOUT:
            exponent += tl.log2(tl.maximum(rescale, 1.0))
        grad_norm = tl.load(norms + key_lane)
        value_norm = tl.load(norms + key_lanes + key_lane)
        log_grad = tl.log2(tl.maximum(grad_norm, 1e-30))
        log_value = tl.log2(tl.maximum(value_norm, 1e-30))
        # The norms are squared.
        bound = 0.5 * (log_grad + log_value)
        bound = bound + 1.0 + exponent
        ds_exponent = tl.maximum(tl.floor(14.0 - bound), -60.0)
        ds_scale = tl.exp2(tl.minimum(ds_exponent, 60.0))
    return ds_scale


@triton.jit
def _lse_in_base_2(lse, p_exponent):
    """An lse to base 2, less ``p_exponent``. In a row without any key, +inf in place of
    -inf makes its probabilities 0 instead of NaN."""
    has_no_key = lse == float("-inf")
    return tl.where(has_no_key, float("inf"), lse * LOG2_E - p_exponent)


@triton.jit
def _probabilities(s, lse2, scores, tile, K: tl.constexpr, MASKED: tl.constexpr):
    """Probabilities from products, and the derivative of the soft cap."""
    _, _, _, keep, pairs, live = tile
    _, log2_scale, _, _ = scores
    softcap_grad = 1.0
    if not K.PLAIN:
        s, softcap_grad = scores_of_products(s, scores, pairs, live, K)
        log2_scale = LOG2_E
    p = tl.exp2(s * log2_scale - lse2)
    if MASKED:
        p = tl.where(keep, p, 0.0)
    return p, softcap_grad


@triton.jit
def _query_tile(dq, staying, moving, tile, K: tl.constexpr, MASKED: tl.constexpr):
    q, do, lse2, delta, ds_scale, rescale = staying
    keys, values, scores = moving
    _, _, _, _, pairs, _ = tile
    _, _, is_dropped = pairs
    k = load_block(keys, tile, K.HEAD_DIM, K, MASKED)
    v = load_block(values, tile, K.VALUE_DIM, K, MASKED)
    k_transposed = tl.trans(k)
    s = tl.dot(q, k_transposed, input_precision=K.PRECISION)
    v_transposed = tl.trans(v)
    dp = tl.dot(do, v_transposed, input_precision=K.PRECISION)
    row_lse = lse2[:, None]
    p, softcap_grad = _probabilities(s, row_lse, scores, tile, K, MASKED)
    if K.DROPOUT:
        dp = tl.where(is_dropped != 0, 0.0, dp * rescale)
    scaled_dp = dp * ds_scale
    centred = scaled_dp - delta[:, None]
    ds = p * centred * softcap_grad
    ds = ds.to(k.dtype)
    return tl.dot(ds, k, dq, input_precision=K.PRECISION)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def query_kernel(
    query,
    key,
    value,
    grad_out,
    lse,
    grad_query,
    query_strides,
    key_strides,
    value_strides,
    grad_out_strides,
    lse_strides,
    grad_query_strides,
    delta,
    norms,
    key_lanes,
    p_exponent,
    p_unscale,
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
    """Add a task's dQ (b, h, n, d) to ``grad_query``, or write it there (ADD False).

    Args:
        starts, entries: a table from runs.py, by blocks of BLOCK_M queries.
        norms: (2, b * hk), squared norms of grad_out and of value, read where SCALE_DS.
        key_lanes: b * hk.
        p_exponent, p_unscale: P is computed times 2**p_exponent; 2**-p_exponent.

    The others are those of ``forward_kernel``.
    """
    block, lane, key_lane = block_of_program(n_blocks, heads, group)
    number = tl.program_id(0) // n_blocks

    rows = block * K.BLOCK_M + tl.arange(0, K.BLOCK_M)
    live = rows < n_queries
    wide_rows = rows.to(tl.int64)
    q = load_rows(query, query_strides, lane, rows, n_queries, K.HEAD_DIM, K.PADDED)
    do = load_rows(
        grad_out, grad_out_strides, lane, rows, n_queries, K.VALUE_DIM, K.PADDED
    )
    row_lse = lse_pointers(lse, lse_strides, lane, rows)
    row_lse = tl.load(row_lse, mask=live, other=float("-inf"))
    lse2 = _lse_in_base_2(row_lse, p_exponent)
    delta_of_head = delta + number.to(tl.int64) * n_queries
    delta_pointers = delta_of_head + wide_rows
    row_delta = tl.load(delta_pointers, mask=live, other=0.0)
    dropout = (seed_low, seed_high, threshold, first_head, first_entry, lane)
    first_key_lane = (number // heads) * (heads // group)
    key_lane_number = first_key_lane + (number % heads) // group
    ds_scale = _ds_scale(norms, key_lane_number, key_lanes, p_exponent, rescale, K)
    row_delta = row_delta * ds_scale
    params = (
        (scale, softcap, slopes),
        (bias, bias_strides, bias_row, bias_column),
        (mask_bits, window_left, window_right),
    )
    lanes = (lane, key_lane)
    moving = (key, key_strides, value, value_strides)
    table = (block, starts, entries, n_queries)
    dq = tl.full([K.BLOCK_M, K.PADDED], 0.0, tl.float32)
    staying = (q, do, lse2, row_delta, ds_scale, rescale)
    dq = walk_keys(dq, staying, lanes, moving, params, table, dropout, _query_tile, K)

    dq_factor = scale / ds_scale * p_unscale
    dq = dq * dq_factor
    store_rows(grad_query, grad_query_strides, lane, rows, n_queries, dq, K.HEAD_DIM, K)


@triton.jit
def _key_tile(state, staying, moving, tile, K: tl.constexpr, MASKED: tl.constexpr):
    dk, dv = state
    k, v, ds_scale, rescale, p_exponent = staying
    queries, grad_outs, lse, lse_stride, delta, scores = moving
    first_row, _, inside, _, pairs, _ = tile
    _, _, dropped = pairs
    q = load_block(queries, tile, K.HEAD_DIM, K, MASKED)
    do = load_block(grad_outs, tile, K.VALUE_DIM, K, MASKED)
    wide_rows = tl.cast(first_row, tl.int64) + tl.arange(0, K.BLOCK_M)
    if MASKED:
        row_lse = tl.load(
            lse + wide_rows * lse_stride, mask=inside, other=float("-inf")
        )
        row_delta = tl.load(delta + wide_rows, mask=inside, other=0.0)
    else:
        row_lse = tl.load(lse + wide_rows * lse_stride)
        row_delta = tl.load(delta + wide_rows)
    lse2 = _lse_in_base_2(row_lse, p_exponent)
    q_transposed = tl.trans(q)
    s = tl.dot(k, q_transposed, input_precision=K.PRECISION)
    column_lse = lse2[None, :]
    p, softcap_grad = _probabilities(s, column_lse, scores, tile, K, MASKED)
    weights = p
    if K.DROPOUT:
        is_dropped = dropped != 0
        weights = tl.where(is_dropped, 0.0, p)
    weights = weights.to(do.dtype)
    dv = tl.dot(weights, do, dv, input_precision=K.PRECISION)
    do_transposed = tl.trans(do)
    dp = tl.dot(v, do_transposed, input_precision=K.PRECISION)
    if K.DROPOUT:
        dp = tl.where(is_dropped, 0.0, dp * rescale)
    scaled_dp = dp * ds_scale
    scaled_delta = (row_delta * ds_scale)[None, :]
    ds = p * (scaled_dp - scaled_delta) * softcap_grad
    ds = ds.to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=K.PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def key_kernel(
    query,
    key,
    value,
    grad_out,
    lse,
    grad_key,
    grad_value,
    query_strides,
    key_strides,
    value_strides,
    grad_out_strides,
    lse_strides,
    grad_key_strides,
    grad_value_strides,
    delta,
    norms,
    key_lanes,
    p_exponent,
    p_unscale,
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
    """Add a task's dK (b, hk, m, d) and dV (b, hk, m, dv), or write them (ADD False).

    One program runs the query heads of a key head one after the other.

    Args:
        query, grad_out: (b, h, n, d), (b, h, n, dv), or descriptors of both.
        starts, entries: a table from runs.py, by blocks of BLOCK_N keys.

    The others are those of ``query_kernel``.
    """
    program = tl.program_id(0)
    # The first blocks of a causal task take longest, so they start first.
    block = program % n_blocks
    number = program // n_blocks
    key_heads = heads // group
    key_lane = lane_of(number, key_heads)
    b, key_head = key_lane

    keys = block * K.BLOCK_N + tl.arange(0, K.BLOCK_N)
    k = load_rows(key, key_strides, key_lane, keys, n_keys, K.HEAD_DIM, K.PADDED)
    v = load_rows(value, value_strides, key_lane, keys, n_keys, K.VALUE_DIM, K.PADDED)
    ds_scale = _ds_scale(norms, number, key_lanes, p_exponent, rescale, K)
    staying = (k, v, ds_scale, rescale, p_exponent)
    lse_entry_stride, lse_head_stride, lse_row_stride = lse_strides
    dk = tl.full([K.BLOCK_N, K.PADDED], 0.0, tl.float32)
    dv = tl.full([K.BLOCK_N, K.PADDED], 0.0, tl.float32)

    for member in range(group):
        h = key_head * group + member
        lane = (b, h)
        scores, head_bias, bits = params_of_head(
            lane,
            (scale, softcap, slopes),
            (bias, bias_strides, bias_row, bias_column),
            (mask_bits, window_left, window_right),
            K,
        )
        lse_of_head = lse + b * lse_entry_stride + h * lse_head_stride
        delta_of_head = delta + (b * key_heads * group + h) * n_queries
        moving = (
            rows_of_head(query, query_strides, lane, K),
            rows_of_head(grad_out, grad_out_strides, lane, K),
            lse_of_head,
            lse_row_stride,
            delta_of_head,
            scores,
        )
        dropout = (seed_low, seed_high, threshold, first_head, first_entry, lane)
        table = (block, starts, entries, n_keys)
        masking = ((window_left, window_right), bits, head_bias, dropout)
        dk, dv = walk((dk, dv), staying, moving, table, masking, _key_tile, True, K)

    dk_factor = scale / ds_scale * p_unscale
    dk = dk * dk_factor
    dv = dv * p_unscale
    if K.DROPOUT:
        dv = dv * rescale
    store_rows(grad_key, grad_key_strides, key_lane, keys, n_keys, dk, K.HEAD_DIM, K)
    store_rows(
        grad_value, grad_value_strides, key_lane, keys, n_keys, dv, K.VALUE_DIM, K
    )
