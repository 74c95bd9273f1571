# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""The forward and the backward of a whole task, in one and in two launches.

A run of a table (``runs.py``) has a clear part, whose pairs need no test, and ragged parts at its
ends. Rows are read by pointers, or by descriptors where the config says that they are faster.

What belongs together is a tuple: strides; a ``lane`` (batch entry, head); a ``run`` (bounds of its
rows of the block, diagonal, distance); a ``part`` of it, from and up to a row of the other side; a
``window`` (left, right); a ``mask`` (pointer, strides of rows and columns, its first row and
column); ``drops``, as ``dropout_params`` returns them; ``scores`` (scale, scale over ln 2,
soft cap, slope). K: a ``launch.Constants``.
"""

import triton
import triton.language as tl

from quorum_attention.kernels.merge_triton import largest_square

NOT_SPECIALIZED = [
    "starts", "entries", "norms", "heads", "key_heads", "group", "key_lanes", "n_queries", "n_keys",
    "n_rows", "n_blocks", "left", "right", "bias_row", "bias_column", "seed_low", "seed_high",
    "threshold", "first_head", "first_entry",
]  # fmt: skip
"""Arguments of the kernels that would only make Triton compile again for other lengths."""

# --- Which pairs of a tile are dropped: ``kernels/dropout.py``, bit for bit the same --------------


@triton.jit
def dropout_params(drops, h, b, K: tl.constexpr):
    """What a program's tiles need of a dropout (``launch._words``), or of none.

    Args:
        drops: halves of the seed, threshold, first head and first entry, all int32; and 1 / (1 - p)
            and 1 - p, fp32.
        h, b: head and batch entry, numbered in the launch.

    Returns:
        (head, entry, key_low, key_high, threshold): words of 32 bits, the first two of the counter,
        numbered in the whole call; and (rescale, share): 1 / (1 - p) and 1 - p.
    """
    chances = 0, 0, 0, 0, 0, 1.0, 1.0
    if K.DROPOUT:
        seed_low, seed_high, threshold, first_head, first_entry, rescale, share = drops
        head = (first_head + h).to(tl.uint32)
        entry = (first_entry + b).to(tl.uint32)
        key_low, key_high = seed_low.to(tl.uint32), seed_high.to(tl.uint32)
        chances = head, entry, key_low, key_high, threshold.to(tl.uint32), rescale, share
    return chances


@triton.jit
def philox(c0, c1, c2, c3, key_low, key_high):
    """The four words of Philox4x32-7; counters and key are uint32 and broadcast."""
    for _ in tl.static_range(7):
        # One multiplication gives both halves. What does not differ by row or by key yet is
        # multiplied once: the first rounds are nearly free.
        one = c0.to(tl.uint64) * 0xD2511F53
        two = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (two >> 32).to(tl.uint32) ^ c1 ^ key_low
        c2 = (one >> 32).to(tl.uint32) ^ c3 ^ key_high
        c1 = two.to(tl.uint32)
        c3 = one.to(tl.uint32)
        key_low += 0x9E3779B9
        key_high += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _four(rows, groups, drops):
    """Whether the four keys of each group are dropped, int8 each."""
    head, entry, key_low, key_high, threshold, _, _ = drops
    w0, w1, w2, w3 = philox(groups, rows, head, entry, key_low, key_high)
    return (
        (w0 < threshold).to(tl.int8), (w1 < threshold).to(tl.int8),
        (w2 < threshold).to(tl.int8), (w3 < threshold).to(tl.int8),
    )  # fmt: skip


@triton.jit
def _pick(skipped, a, b, c, d):
    return tl.where(skipped == 0, a, tl.where(skipped == 1, b, tl.where(skipped == 2, c, d)))


@triton.jit
def dropped(rows, at_key, drops, BY_KEY: tl.constexpr, K: tl.constexpr):
    """Which pairs of a tile are dropped: (BLOCK_M, BLOCK_N) int8, not 0 where they are; with BY_KEY
    (BLOCK_N, BLOCK_M).

    Args:
        rows: (BLOCK_M,) int32, global positions of the queries.
        at_key: int32, global position of the first of BLOCK_N neighbouring keys; with DROPOUT 2 a
            multiple of four, with 1 anything (twice the work).
        drops: as ``dropout_params`` returns them.
    """
    at = at_key.to(tl.uint32)
    groups = ((at // 4) + tl.arange(0, K.BLOCK_N // 4).to(tl.uint32))[None, :]
    rows = rows.to(tl.uint32)[:, None]
    f0, f1, f2, f3 = _four(rows, groups, drops)
    if K.DROPOUT == 1:
        e0, e1, e2, _ = _four(rows, groups + 1, drops)
        skipped = at % 4
        g0 = _pick(skipped, f0, f1, f2, f3)
        g1 = _pick(skipped, f1, f2, f3, e0)
        g2 = _pick(skipped, f2, f3, e0, e1)
        f3 = _pick(skipped, f3, e0, e1, e2)
        f0, f1, f2 = g0, g1, g2
    # The last dimensions, of the joins, become neighbouring keys.
    found = tl.join(tl.join(f0, f2), tl.join(f1, f3)).reshape(K.BLOCK_M, K.BLOCK_N)
    if BY_KEY:
        found = tl.trans(found)
    return found


# --- One tile -------------------------------------------------------------------------------------


@triton.jit
def rows_at(source, strides, lane, rows, PADDED: tl.constexpr):
    """Pointers to rows of a head of (b, h, n, d): (rows, PADDED). Offsets that may span a whole
    tensor have 64 bits."""
    b, h = lane
    source += b * strides[0] + h * strides[1]
    return source + rows.to(tl.int64)[:, None] * strides[2] + tl.arange(0, PADDED)[None, :]


@triton.jit
def cells(rows, n_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Which of the cells of ``rows_at`` there are."""
    return (rows < n_rows)[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :]


@triton.jit
def load_rows(source, strides, lane, rows, n_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Some rows of a head, (rows, PADDED), and 0 where there are none."""
    live = cells(rows, n_rows, WIDTH, PADDED)
    return tl.load(rows_at(source, strides, lane, rows, PADDED), mask=live, other=0.0)


@triton.jit
def store_rows(target, strides, lane, rows, n_rows, block, WIDTH: tl.constexpr, K: tl.constexpr):
    """Write a block to some rows of a head, or with ADD add it to them."""
    at = rows_at(target, strides, lane, rows, K.PADDED)
    live = cells(rows, n_rows, WIDTH, K.PADDED)
    if K.ADD:
        block += tl.load(at, mask=live, other=0.0).to(tl.float32)
    tl.store(at, block.to(target.dtype.element_ty), mask=live)


@triton.jit
def changes_of(lane, how, bias, bits, K: tl.constexpr):
    """(scores, mask, bits) of a head, as tiles are given them."""
    scale, softcap, slopes = how
    bias, bias_s, bias_row, bias_column = bias
    mask_bits, left, right = bits
    slope = 0.0
    if K.ALIBI:
        slope = tl.load(slopes + lane[1])
    if K.BIAS:
        bias += lane[0] * bias_s[0] + lane[1] * bias_s[1]
    if K.BITS:
        mask_bits += lane[0] * left + lane[1] * right
    scores = scale, scale * 1.4426950408889634, softcap, slope
    return scores, (bias, bias_s[2], bias_s[3], bias_row, bias_column), mask_bits


@triton.jit
def lane_of(source, lane, strides, K: tl.constexpr):
    """Where a head begins; with a descriptor, the head is given in each load instead."""
    if K.DESCRIBED:
        return source
    else:  # noqa: RET505
        return source + lane[0] * strides[0] + lane[1] * strides[1]


@triton.jit
def block_rows(source, lane, part, WIDTH: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr):
    """Some rows of a head, (rows, PADDED); columns from WIDTH on are 0.

    Args:
        source: what ``lane_of`` returned.
        part: (first row, which rows (n,), their stride, which of them to read if MASKED: the others
            are 0). A descriptor ignores the last: only rows beyond the tensor are 0.
    """
    at, rows, stride, live = part
    if K.DESCRIBED:
        block = source.load([lane[0].to(tl.int32), lane[1].to(tl.int32), at, 0])
        return block.reshape(rows.shape[0], K.PADDED)
    else:  # noqa: RET505
        columns = tl.arange(0, K.PADDED)
        rows = tl.arange(0, rows.shape[0])
        # Offsets have 64 bits across a tensor, 32 within a tile.
        tile = rows[:, None] * stride + columns[None, :]
        pointers = source + tl.cast(at, tl.int64) * stride + tile
        if MASKED:
            return tl.load(pointers, mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0)
        elif WIDTH != K.PADDED:  # noqa: RET505
            return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def modified(s, scores, pairs, live, K: tl.constexpr):
    """Scores from products: scaled, then soft-capped, then ALiBi and the mask.

    Args:
        s: products.
        pairs: of ``pairs_of_tile``.
        live: which pointers of the mask to read.

    Returns:
        scores, and the derivative of the soft cap (1 without one).
    """
    scale, _, softcap, slope = scores
    apart, bias_at, _ = pairs
    s = s * scale
    softcap_grad = 1.0
    if K.SOFTCAP:
        # tanh from the exponential of a negative number, which cannot overflow.
        e = tl.exp(-2.0 * tl.abs(s) / softcap)
        t = (1.0 - e) / (1.0 + e)
        t = tl.where(s < 0, -t, t)
        s = softcap * t
        softcap_grad = 1.0 - t * t
    if K.ALIBI:
        s -= slope * tl.abs(apart).to(tl.float32)
    if K.BIAS:
        s += tl.load(bias_at, mask=live, other=0.0).to(tl.float32)
    return s, softcap_grad


@triton.jit
def kept(rows, columns, run, part, window, K: tl.constexpr):
    """Which pairs of a tile belong to a part of a run of queries; rows are queries, columns
    keys."""
    column_low, column_high, diagonal, distance = run
    row_low, row_high = part
    left, right = window
    keep = (rows >= row_low) & (rows < row_high) & (columns >= column_low)
    # The difference is compared; a sum with the diagonal might not fit 32 bits.
    keep = keep & (columns < column_high) & (columns - rows <= diagonal)
    if K.WINDOW:
        apart = rows - columns
        keep = keep & (apart + distance <= left) & (apart + distance >= -right)
    return keep


@triton.jit
def keys_kept(rows, columns, run, part, window, K: tl.constexpr):
    """Which pairs of rows (m, 1) and columns (1, n) belong to a part of a run of keys, by the first
    and last key of each row: two comparisons for a pair. (With the roles exchanged ``kept`` is
    quicker, docs/native.md.)"""
    row_low, row_high, diagonal, distance = run
    column_low, column_high = part
    left, right = window
    # Sums with NO_DIAGONAL or UNLIMITED do not fit 32 bits; what they are cut off to does.
    wide = rows.to(tl.int64)
    high = tl.minimum(wide + diagonal + 1, column_high)
    low = column_low
    if K.WINDOW:
        high = tl.minimum(high, wide + distance + right + 1)
        low = tl.minimum(tl.maximum(wide + distance - left, column_low), column_high).to(tl.int32)
    inside = (rows >= row_low) & (rows < row_high)
    high = tl.where(inside, tl.maximum(high, column_low), column_low).to(tl.int32)
    return (columns >= low) & (columns < high)


@triton.jit
def bits_kept(keep, bits, at, pairs, K: tl.constexpr):
    """Which of the pairs ``keep`` are kept by bits too.

    Args:
        bits: the mask bits, int32, of all partial blocks of a lane: 128 rows of four words, a bit
            for each key.
        at: the run's entry, which says whether it is a partial block, and where its mask bits
            begin.
        pairs: (queries, keys), local positions as they lie in the tile. Blocks divide them at
            multiples of 128.
    """
    rows, columns = pairs
    if K.BITS:
        mixed = tl.load(at + 8)
        where = tl.load(at + 9) + (rows & 127) * 4 + ((columns & 127) >> 5)
        word = tl.load(bits + where, mask=keep & (mixed != 0), other=0)
        bit = (word >> (columns & 31)) & 1
        keep = keep & ((bit != 0) | (mixed == 0))
    return keep


@triton.jit
def pairs_of_tile(at, sides, K: tl.constexpr, BY_KEY: tl.constexpr):
    """(global distances, pointers to the additive mask, dropped pairs) of a tile (rows, keys); with
    BY_KEY (keys, rows).

    Args:
        at: (first row of the block, first of the other side, distance, shift): local positions;
            ``FIELDS`` of runs.py.
        sides: (mask, drops).
    """
    first_row, first_key, distance, shift = at
    rows, keys = tl.arange(0, K.BLOCK_M)[:, None], tl.arange(0, K.BLOCK_N)[None, :]
    if BY_KEY:
        first_key, first_row, _, _ = at
        rows, keys = tl.arange(0, K.BLOCK_M)[None, :], tl.arange(0, K.BLOCK_N)[:, None]
    mask, drops = sides
    bias, bias_q, bias_k, bias_row, bias_column = mask
    if K.BIAS:
        bias += (tl.cast(first_row, tl.int64) - bias_row + rows) * bias_q + (
            tl.cast(first_key, tl.int64) - bias_column + keys
        ) * bias_k
    drop = 0
    if K.DROPOUT:
        own = first_row + tl.arange(0, K.BLOCK_M) + shift
        drop = dropped(own, first_key + shift - distance, drops, BY_KEY, K)
    return (first_row + rows) - (first_key + keys) + distance, bias, drop


@triton.jit
def walk(state, own, table, TILE: tl.constexpr, BY_KEY: tl.constexpr, K: tl.constexpr):
    """``state`` after all runs of a block of queries, or with BY_KEY of a block of keys.

    Args:
        own: what TILE reads of the block's rows.
        table: (block, starts, entries, rows, window, bits, sides, others): its number; of runs.py,
            by the blocks; rows of the call along them; see ``pairs_of_tile``; and what TILE reads
            of the other side.
        TILE: ``TILE(state, own, others, tile, K, MASKED)`` is the state after one more tile: (first
            row of the other side, rows (n,), which of them to read, pairs, which of these to keep,
            ``pairs_of_tile``, pointers of the mask to read).
    """
    block, starts, entries, n_rows, window, bits, sides, others = table
    SIDE: tl.constexpr = K.BLOCK_N if BY_KEY else K.BLOCK_M
    STEP: tl.constexpr = K.BLOCK_M if BY_KEY else K.BLOCK_N
    BEFORE: tl.constexpr = 0 if BY_KEY else 1
    first = block * SIDE
    rows = first + tl.arange(0, SIDE)
    live = (rows < n_rows)[:, None]
    steps = tl.arange(0, STEP)
    for index in range(tl.load(starts + block), tl.load(starts + block + 1)):
        at = entries + index * K.FIELDS
        distance = tl.load(at + 7)
        run = tl.load(at), tl.load(at + 1), tl.load(at + 6), distance
        start, begin, end, stop = (
            tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
        )  # fmt: skip
        shift = 0
        if K.DROPOUT:
            shift = tl.load(at + 9)

        for step in tl.range(begin, end, STEP):
            some = step + steps
            pairs = pairs_of_tile((first, step, distance, shift), sides, K, BY_KEY)
            tile = step, some, True, True, pairs, live
            state = TILE(state, own, others, tile, K, False)

        # The ragged parts, at the diagonal first. Only a window has some before a block of queries.
        for side in range(2 if K.WINDOW or BY_KEY else 1):
            low = tl.where(side == BEFORE, start, end)
            high = tl.where(side == BEFORE, begin, stop)
            for step in tl.range(low, high, STEP, num_stages=K.RAGGED):
                some = step + steps
                if BY_KEY:
                    both = some[None, :], rows[:, None]
                    keep = kept(both[0], both[1], run, (low, high), window, K)
                    keep = bits_kept(keep, bits, at, both, K)
                else:
                    both = rows[:, None], some[None, :]
                    keep = keys_kept(both[0], both[1], run, (low, high), window, K)
                    keep = bits_kept(keep, bits, at, both, K)
                pairs = pairs_of_tile((first, step, distance, shift), sides, K, BY_KEY)
                tile = step, some, some < high, keep, pairs, keep
                state = TILE(state, own, others, tile, K, True)
    return state


# --- Forward --------------------------------------------------------------------------------------
#
# A program takes a block of query rows and walks its runs of key blocks. It holds (acc, m, l) in
# registers: the running output before division, the running maximum in units of ln 2, and the
# running sum (paper, section 3; the recurrence is FlashAttention-2's). It starts from the
# statistics that the rows already have, which merges the task into them.
#
# P is rounded to 16 bits where it meets the value, and not in l. That cancels in the largest P of a
# row only if this is a power of two, but it is that times two to the rounding of m: where m is
# thousands, a row of one key is one last place off its value.


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
    query, key, value, out, lse, starts, entries, bias, slopes, mask_bits,
    heads, group, n_queries, n_blocks, q_s, k_s, v_s, o_s, l_s,
    seed_low, seed_high, threshold, first_head, first_entry, rescale, share,
    bias_s, bias_row, bias_column, scale, softcap, left, right,
    RESUME: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Merge a task's runs into (out, lse), or write them there (RESUME False).

    query (b, h, n, d), key, value (b, hk, m, d or dv), out (b, h, n, dv) any floating dtype, lse
    (b, h, n) fp32; strides (``_s``) in elements, the last dimension contiguous. ``starts`` and
    ``entries``: a table from runs.py, by blocks of BLOCK_M queries. ``bias_row``, ``bias_column``:
    local positions of the mask's first row and column. ``group``: query heads of a key head.
    ``seed_low`` to ``share``: see ``dropout_params``; read with DROPOUT.
    BITS: ``mask_bits`` are those of partial blocks (``bits_kept``), and ``left`` and ``right``
    their strides by entry and head.
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
    q = load_rows(query, q_s, lane, rows, n_queries, K.HEAD_DIM, K.PADDED)
    out_at = rows_at(out, o_s, lane, rows, K.PADDED)
    out_live = cells(rows, n_queries, K.VALUE_DIM, K.PADDED)
    lse_at = lse + lane[0] * l_s[0] + lane[1] * l_s[1] + rows.to(tl.int64) * l_s[2]
    drops = seed_low, seed_high, threshold, first_head, first_entry, rescale, share
    chances = dropout_params(drops, lane[1], lane[0], K)
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
    of_bias, of_bits = (bias, bias_s, bias_row, bias_column), (mask_bits, left, right)
    scores, mask, bits = changes_of(lane, (scale, softcap, slopes), of_bias, of_bits, K)
    keys = (
        lane_of(key, shared, k_s, K), lane_of(value, shared, v_s, K), shared, k_s[2], v_s[2], scores
    )  # fmt: skip
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


# --- Backward: by blocks of queries (dQ), then by blocks of keys (dK, dV) -------------------------
#
# With the global lse, P = exp(S - lse) and delta = rowsum(dO * O) (paper, section 3):
#
#     dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale dS K,   dK = scale dS^T Q.
#
# P is computed twice, so that no two programs add to the same number: the result is bit-for-bit
# repeatable. For fp16, P is computed times 2**p_exponent, and dS times a power of two for each key
# head, its ``ds_scale``, which follows from the largest norms of its rows. So both stay in fp16's
# normal range and cannot overflow (design, section 2).


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
    g = load_rows(grad_out, g_s, lane, rows, n_rows, VALUE_DIM, PADDED).to(tl.float32)
    o = load_rows(out, o_s, lane, rows, n_rows, VALUE_DIM, PADDED)
    found = tl.sum(g * o.to(tl.float32), 1)
    tl.store(delta + number.to(tl.int64) * n_rows + rows.to(tl.int64), found, mask=rows < n_rows)
    if NORMS:
        tl.atomic_max(norms + number // group, largest_square(g))


@triton.jit
def _ds_scale(norms, lane, lanes, largest, rescale, K: tl.constexpr):
    """A key head's power of two for dS: it keeps 2**largest |dS| <= 2**(largest + 1) g v near
    2**14. With dropout dS is larger by ``rescale``."""
    ds_scale = 1.0
    if K.SCALE_DS:
        if K.DROPOUT:
            largest += tl.log2(tl.maximum(rescale, 1.0))
        g2, v2 = tl.load(norms + lane), tl.load(norms + lanes + lane)
        bound = 0.5 * (tl.log2(tl.maximum(g2, 1e-30)) + tl.log2(tl.maximum(v2, 1e-30)))
        bound = bound + 1.0 + largest
        ds_scale = tl.exp2(tl.minimum(tl.maximum(tl.floor(14.0 - bound), -60.0), 60.0))
    return ds_scale


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
    mask_bits, heads, group, n_queries, n_blocks, key_lanes,
    q_s, k_s, v_s, g_s, l_s, dq_s,
    seed_low, seed_high, threshold, first_head, first_entry, rescale, share,
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
    q = load_rows(query, q_s, lane, rows, n_queries, K.HEAD_DIM, K.PADDED)
    do = load_rows(grad_out, g_s, lane, rows, n_queries, K.VALUE_DIM, K.PADDED)
    lse += lane[0] * l_s[0] + lane[1] * l_s[1]
    own = tl.load(lse + wide_rows * l_s[2], mask=live, other=float("-inf"))
    lse2 = _lse2(own, p_exponent)
    d_row = tl.load(delta + number.to(tl.int64) * n_queries + wide_rows, mask=live, other=0.0)
    drops = seed_low, seed_high, threshold, first_head, first_entry, rescale, share
    chances = dropout_params(drops, lane[1], lane[0], K)
    of_keys = (number // heads) * (heads // group) + (number % heads) // group
    ds_scale = _ds_scale(norms, of_keys, key_lanes, p_exponent, chances[5], K)
    d_row = d_row * ds_scale
    of_bias, of_bits = (bias, bias_s, bias_row, bias_column), (mask_bits, left, right)
    scores, mask, bits = changes_of(lane, (scale, softcap, slopes), of_bias, of_bits, K)
    keys = (
        lane_of(key, shared, k_s, K), lane_of(value, shared, v_s, K), shared, k_s[2], v_s[2], scores
    )  # fmt: skip
    table = block, starts, entries, n_queries, (left, right), bits, (mask, chances), keys
    dq = tl.full([K.BLOCK_M, K.PADDED], 0.0, tl.float32)
    own_rows = q, do, lse2, d_row, ds_scale, chances[5]
    dq = walk(dq, own_rows, table, _query_tile, False, K)

    dq = dq * (scale / ds_scale * p_unscale)
    store_rows(grad_query, dq_s, lane, rows, n_queries, dq, K.HEAD_DIM, K)


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
    slopes, mask_bits, key_heads, group, n_queries, n_keys, n_blocks, key_lanes,
    q_s, k_s, v_s, g_s, l_s, dk_s, dv_s,
    seed_low, seed_high, threshold, first_head, first_entry, rescale, share,
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
    k = load_rows(key, k_s, shared, keys, n_keys, K.HEAD_DIM, K.PADDED)
    v = load_rows(value, v_s, shared, keys, n_keys, K.VALUE_DIM, K.PADDED)
    drops = seed_low, seed_high, threshold, first_head, first_entry, rescale, share
    chances = dropout_params(drops, h_k, b, K)
    ds_scale = _ds_scale(norms, number, key_lanes, p_exponent, chances[5], K)
    own = k, v, ds_scale, chances[5], p_exponent
    dk = tl.full([K.BLOCK_N, K.PADDED], 0.0, tl.float32)
    dv = tl.full([K.BLOCK_N, K.PADDED], 0.0, tl.float32)

    for member in range(group):
        h = h_k * group + member
        lane = b, h
        of_bias, of_bits = (bias, bias_s, bias_row, bias_column), (mask_bits, left, right)
        scores, mask, bits = changes_of(lane, (scale, softcap, slopes), of_bias, of_bits, K)
        queries = (
            lane_of(query, lane, q_s, K), lane_of(grad_out, lane, g_s, K), lane, q_s[2], g_s[2],
            lse + b * l_s[0] + h * l_s[1], l_s[2],
            delta + (b * key_heads * group + h) * n_queries, scores,
        )  # fmt: skip
        sides = mask, dropout_params(drops, h, b, K)
        table = block, starts, entries, n_keys, (left, right), bits, sides, queries
        dk, dv = walk((dk, dv), own, table, _key_tile, True, K)

    dk = dk * (scale / ds_scale * p_unscale)
    dv = dv * p_unscale
    if K.DROPOUT:
        dv = dv * chances[5]
    store_rows(grad_key, dk_s, shared, keys, n_keys, dk, K.HEAD_DIM, K)
    store_rows(grad_value, dv_s, shared, keys, n_keys, dv, K.VALUE_DIM, K)
