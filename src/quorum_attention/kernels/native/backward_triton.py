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

from quorum_attention.kernels.merge_triton import largest_square
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


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def delta_kernel(
    grad_out, out, delta, norms, heads, group, n_rows, g_s, o_s, VALUE_DIM: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Delta (b, h, n) = rowsum(grad_out * out), and the norms (b, hk) of grad_out."""
    n_blocks = tl.cdiv(n_rows, BLOCK)
    program = tl.program_id(0)
    number = program // n_blocks
    lane = (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    rows = (program % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    live = cells(rows, n_rows, VALUE_DIM, PADDED)
    g = tl.load(rows_at(grad_out, g_s, lane, rows, PADDED), mask=live, other=0.0).to(tl.float32)
    o = tl.load(rows_at(out, o_s, lane, rows, PADDED), mask=live, other=0.0)
    found = tl.sum(g * o.to(tl.float32), 1)
    tl.store(delta + number.to(tl.int64) * n_rows + rows.to(tl.int64), found, mask=rows < n_rows)
    if NORMS:
        tl.atomic_max(norms + number // group, largest_square(g))


@triton.jit
def _ds_scale(norms, lane, lanes, largest):
    """A key head's power of two for dS: it keeps 2**largest |dS| <= 2**(largest + 1) g v near
    2**14."""
    g2 = tl.load(norms + lane)
    v2 = tl.load(norms + lanes + lane)
    bound = 0.5 * (tl.log2(tl.maximum(g2, 1e-30)) + tl.log2(tl.maximum(v2, 1e-30))) + 1.0 + largest
    return tl.exp2(tl.minimum(tl.maximum(tl.floor(14.0 - bound), -60.0), 60.0))


@triton.jit
def _lse2(own, p_exponent):
    """From an lse, to base 2. In a row without any key, +inf in place of -inf makes its
    probabilities 0 instead of NaN."""
    return tl.where(own == float("-inf"), float("inf"), own * 1.4426950408889634 - p_exponent)


@triton.jit
def _probabilities(s, lse2, scores, tile, K: tl.constexpr, MASKED: tl.constexpr):
    """Probabilities from products, and the derivative of the soft cap."""
    _, _, _, keep, pairs, live = tile
    log2_scale = scores[1]
    softcap_grad = 1.0
    if not K.PLAIN:
        s, softcap_grad = modified(s, scores, pairs, live, K)
        log2_scale = 1.4426950408889634
    p = tl.exp2(s * log2_scale - lse2)
    if MASKED:
        p = tl.where(keep, p, 0.0)
    return p, softcap_grad


@triton.jit
def _query_tile(dq, own, keys, tile, K: tl.constexpr, MASKED: tl.constexpr):
    q, do, lse2, delta, ds_scale, rescale = own
    key, value, lane, k_n, v_n, scores = keys
    at_key, some, inside, _, pairs, _ = tile
    k = block_rows(key, lane, (at_key, some, k_n, inside), K.HEAD_DIM, K, MASKED)
    v = block_rows(value, lane, (at_key, some, v_n, inside), K.VALUE_DIM, K, MASKED)
    s = tl.dot(q, tl.trans(k), input_precision=K.PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=K.PRECISION)
    p, softcap_grad = _probabilities(s, lse2[:, None], scores, tile, K, MASKED)
    if K.DROPOUT:
        dp = tl.where(pairs[2] != 0, 0.0, dp * rescale)
    ds = p * (dp * ds_scale - delta[:, None]) * softcap_grad
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=K.PRECISION)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def query_kernel(
    query, key, value, grad_out, lse, delta, norms, grad_query, starts, entries, bias, slopes,
    own_bits, key_bits, heads, group, n_queries, n_blocks, key_lanes,
    q_s, k_s, v_s, g_s, l_s, dq_s,
    seed_low, seed_high, threshold, first_head, first_entry, repeat, rescale, share,
    bias_s, bias_row, bias_column, scale, softcap, left, right, p_exponent, p_unscale,
    K: tl.constexpr,
):  # fmt: skip
    """Add a task's dQ (b, h, n, d) to ``grad_query``, or write it there (ADD False).

    ``starts`` and ``entries``: by blocks of BLOCK_M queries. ``norms`` (2, b * hk): squared norms
    of grad_out and of value, read where SCALE_DS. Otherwise see ``forward_kernel``.
    """
    program = tl.program_id(0)
    block = n_blocks - 1 - program % n_blocks
    number = program // n_blocks
    b = (number // heads).to(tl.int64)
    h = number % heads
    lane, shared = (b, h.to(tl.int64)), (b, (h // group).to(tl.int64))

    rows = block * K.BLOCK_M + tl.arange(0, K.BLOCK_M)
    live = rows < n_queries
    wide_rows = rows.to(tl.int64)
    q_live = cells(rows, n_queries, K.HEAD_DIM, K.PADDED)
    q = tl.load(rows_at(query, q_s, lane, rows, K.PADDED), mask=q_live, other=0.0)
    do = tl.load(
        rows_at(grad_out, g_s, lane, rows, K.PADDED),
        mask=cells(rows, n_queries, K.VALUE_DIM, K.PADDED),
        other=0.0,
    )
    lse += lane[0] * l_s[0] + lane[1] * l_s[1]
    own = tl.load(lse + wide_rows * l_s[2], mask=live, other=float("-inf"))
    lse2 = _lse2(own, p_exponent)
    d_row = tl.load(delta + number.to(tl.int64) * n_queries + wide_rows, mask=live, other=0.0)
    chances = 0, 0, 0, 0, 0, 1.0, 1.0
    largest = p_exponent
    if K.DROPOUT:
        drops = seed_low, seed_high, threshold, first_head, first_entry, repeat, rescale, share
        chances = dropout_params(drops, lane[1], lane[0])
        # dS is larger by the factor of what is not dropped.
        largest = p_exponent + tl.log2(tl.maximum(chances[5], 1.0))
    ds_scale = 1.0
    if K.SCALE_DS:
        of_keys = (number // heads) * (heads // group) + (number % heads) // group
        ds_scale = _ds_scale(norms, of_keys, key_lanes, largest)
        d_row = d_row * ds_scale
    slope = 0.0
    if K.ALIBI:
        slope = tl.load(slopes + h)
    if K.BIAS:
        bias += lane[0] * bias_s[0] + lane[1] * bias_s[1]
    if K.BITS == 2:
        own_bits += lane[0] * left + lane[1] * right
    scores = scale, scale * 1.4426950408889634, softcap, slope
    keys = (
        lane_of(key, shared, k_s, K), lane_of(value, shared, v_s, K), shared, k_s[2], v_s[2], scores
    )  # fmt: skip
    mask = bias, bias_s[2], bias_s[3], bias_row, bias_column
    bits = own_bits, key_bits
    table = block, starts, entries, n_queries, (left, right), bits, (mask, chances), keys
    dq = tl.full([K.BLOCK_M, K.PADDED], 0.0, tl.float32)
    own_rows = q, do, lse2, d_row, ds_scale, chances[5]
    dq = walk(dq, own_rows, table, _query_tile, False, K)

    dq = dq * (scale / ds_scale * p_unscale)
    dq_at = rows_at(grad_query, dq_s, lane, rows, K.PADDED)
    if K.ADD:
        dq += tl.load(dq_at, mask=q_live, other=0.0).to(tl.float32)
    tl.store(dq_at, dq.to(grad_query.dtype.element_ty), mask=q_live)


@triton.jit
def _key_tile(state, own, queries, tile, K: tl.constexpr, MASKED: tl.constexpr):
    dk, dv = state
    k, v, ds_scale, rescale, p_exponent = own
    query, grad_out, lane, q_n, g_n, lse, l_n, delta, scores = queries
    at_row, some, inside, _, pairs, _ = tile
    q = block_rows(query, lane, (at_row, some, q_n, inside), K.HEAD_DIM, K, MASKED)
    do = block_rows(grad_out, lane, (at_row, some, g_n, inside), K.VALUE_DIM, K, MASKED)
    wide_rows = tl.cast(at_row, tl.int64) + tl.arange(0, K.BLOCK_M)
    if MASKED:
        row_lse = tl.load(lse + wide_rows * l_n, mask=inside, other=float("-inf"))
        row_delta = tl.load(delta + wide_rows, mask=inside, other=0.0)
    else:
        row_lse = tl.load(lse + wide_rows * l_n)
        row_delta = tl.load(delta + wide_rows)
    lse2 = _lse2(row_lse, p_exponent)
    s = tl.dot(k, tl.trans(q), input_precision=K.PRECISION)
    p, softcap_grad = _probabilities(s, lse2[None, :], scores, tile, K, MASKED)
    weights = p
    if K.DROPOUT:
        gone = pairs[2] != 0
        weights = tl.where(gone, 0.0, p)
    dv = tl.dot(weights.to(do.dtype), do, dv, input_precision=K.PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=K.PRECISION)
    if K.DROPOUT:
        dp = tl.where(gone, 0.0, dp * rescale)
    ds = p * (dp * ds_scale - (row_delta * ds_scale)[None, :]) * softcap_grad
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=K.PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def key_kernel(
    query, key, value, grad_out, lse, delta, norms, grad_key, grad_value, starts, entries, bias,
    slopes, own_bits, key_bits, key_heads, group, n_queries, n_keys, n_blocks, key_lanes,
    q_s, k_s, v_s, g_s, l_s, dk_s, dv_s,
    seed_low, seed_high, threshold, first_head, first_entry, repeat, rescale, share,
    bias_s, bias_row, bias_column, scale, softcap, left, right, p_exponent, p_unscale,
    K: tl.constexpr,
):  # fmt: skip
    """Add a task's dK (b, hk, m, d) and dV (b, hk, m, dv), or write them (ADD False).

    ``starts`` and ``entries``: by blocks of BLOCK_N keys. One program runs the query heads of a
    key head one after the other. Otherwise see ``query_kernel``.
    """
    program = tl.program_id(0)
    # The first blocks of a causal task take longest, so they start first.
    block = program % n_blocks
    number = program // n_blocks
    shared = (number // key_heads).to(tl.int64), (number % key_heads).to(tl.int64)
    b, h_k = shared

    keys = block * K.BLOCK_N + tl.arange(0, K.BLOCK_N)
    k_live = cells(keys, n_keys, K.HEAD_DIM, K.PADDED)
    v_live = cells(keys, n_keys, K.VALUE_DIM, K.PADDED)
    k = tl.load(rows_at(key, k_s, shared, keys, K.PADDED), mask=k_live, other=0.0)
    v = tl.load(rows_at(value, v_s, shared, keys, K.PADDED), mask=v_live, other=0.0)
    drops = seed_low, seed_high, threshold, first_head, first_entry, repeat, rescale, share
    chances = 0, 0, 0, 0, 0, 1.0, 1.0
    largest = p_exponent
    if K.DROPOUT:
        chances = dropout_params(drops, h_k, b)
        largest = p_exponent + tl.log2(tl.maximum(chances[5], 1.0))
    ds_scale = 1.0
    if K.SCALE_DS:
        ds_scale = _ds_scale(norms, number, key_lanes, largest)
    own = k, v, ds_scale, chances[5], p_exponent
    dk = tl.full([K.BLOCK_N, K.PADDED], 0.0, tl.float32)
    dv = tl.full([K.BLOCK_N, K.PADDED], 0.0, tl.float32)

    for member in range(group):
        h = h_k * group + member
        lane = b, h
        bits = own_bits, key_bits
        if K.BITS == 2:
            bits = own_bits + b * left + h * right, key_bits
        some_chances = chances
        if K.DROPOUT:
            some_chances = dropout_params(drops, h, b)
        slope = 0.0
        if K.ALIBI:
            slope = tl.load(slopes + h)
        bias_h = bias
        if K.BIAS:
            bias_h += b * bias_s[0] + h * bias_s[1]
        sides = (bias_h, bias_s[2], bias_s[3], bias_row, bias_column), some_chances
        queries = (
            lane_of(query, lane, q_s, K), lane_of(grad_out, lane, g_s, K), lane, q_s[2], g_s[2],
            lse + b * l_s[0] + h * l_s[1], l_s[2],
            delta + (b * key_heads * group + h) * n_queries,
            (scale, scale * 1.4426950408889634, softcap, slope),
        )  # fmt: skip
        table = block, starts, entries, n_keys, (left, right), bits, sides, queries
        dk, dv = walk((dk, dv), own, table, _key_tile, True, K)

    dk = dk * (scale / ds_scale * p_unscale)
    dv = dv * p_unscale
    if K.DROPOUT:
        dv = dv * chances[5]
    dk_at = rows_at(grad_key, dk_s, shared, keys, K.PADDED)
    dv_at = rows_at(grad_value, dv_s, shared, keys, K.PADDED)
    if K.ADD:
        dk += tl.load(dk_at, mask=k_live, other=0.0).to(tl.float32)
        dv += tl.load(dv_at, mask=v_live, other=0.0).to(tl.float32)
    tl.store(dk_at, dk.to(grad_key.dtype.element_ty), mask=k_live)
    tl.store(dv_at, dv.to(grad_value.dtype.element_ty), mask=v_live)
