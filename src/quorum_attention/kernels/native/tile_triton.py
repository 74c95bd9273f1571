# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""One tile: the run it belongs to, the rows it reads, its scores, and which of its pairs are kept.

A run has a clear part, whose pairs need no test, and ragged parts at its ends. Rows are read in one
of three ways (READ): "pointers"; "descriptors", where the config says that they are faster; and
"wide": pointers with 64-bit offsets within a tile, for rows that are very far apart.

What belongs together is a tuple: strides; a ``lane`` (batch entry, head); a ``run`` (bounds of its
rows of the block, diagonal, distance); a ``part`` of it, from and up to a row of the other side; a
``window`` (left, right); a ``mask`` (pointer, strides of rows and columns, its first row and
column); ``drops``, as ``dropout_params`` returns them; ``scores`` (scale, scale over ln 2,
soft cap, slope). K: a ``launch.Constants``.
"""

import triton
import triton.language as tl

from quorum_attention.kernels.native.dropout_triton import dropped

NOT_SPECIALIZED = [
    "starts", "entries", "norms", "heads", "key_heads", "group", "key_lanes", "n_queries", "n_keys",
    "n_rows", "n_blocks", "left", "right", "bias_row", "bias_column", "seed_low", "seed_high",
    "threshold", "first_head", "first_entry", "repeat",
]  # fmt: skip
"""Arguments of the kernels that would only make Triton compile again for other lengths."""


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
def lane_of(source, lane, strides, K: tl.constexpr):
    """Where a head begins; with a descriptor, the head is given in each load instead."""
    if K.READ == "descriptors":
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
    if K.READ == "descriptors":
        block = source.load([lane[0].to(tl.int32), lane[1].to(tl.int32), at, 0])
        return block.reshape(rows.shape[0], K.PADDED)
    else:  # noqa: RET505
        columns = tl.arange(0, K.PADDED)
        rows = tl.arange(0, rows.shape[0])
        if K.READ == "wide":
            rows = rows.to(tl.int64)
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
def bits_kept(keep, bits, at, pairs, live, K: tl.constexpr):
    """Which of the pairs ``keep`` are kept by bits too.

    Args:
        bits: BITS 1: group bits of queries and of keys. BITS 2: first the mask bits, int32, of all
            partial blocks of a lane: 128 rows of four words, a bit for each key.
        at: the run's entry, which says whether it is a partial block, and where its mask bits
            begin.
        pairs: (queries, keys), local positions as they lie in the tile. Blocks divide them at
            multiples of 128.
        live: which of both there are.
    """
    rows, columns = pairs
    if K.BITS == 2:
        mixed = tl.load(at + 8)
        where = tl.load(at + 9) + (rows & 127) * 4 + ((columns & 127) >> 5)
        word = tl.load(bits[0] + where, mask=keep & (mixed != 0), other=0)
        bit = (word >> (columns & 31)) & 1
        keep = keep & ((bit != 0) | (mixed == 0))
    if K.BITS == 1:
        # Read again for each tile: holding them would cost the clear tiles registers.
        own = tl.load(bits[0] + rows, mask=live[0], other=0)
        other = tl.load(bits[1] + columns, mask=live[1], other=0)
        keep = keep & ((own & other) == 0)
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
                inside = (some < high)[None, :]
                if BY_KEY:
                    both = some[None, :], rows[:, None]
                    keep = kept(both[0], both[1], run, (low, high), window, K)
                    keep = bits_kept(keep, bits, at, both, (inside, live), K)
                else:
                    both = rows[:, None], some[None, :]
                    keep = keys_kept(both[0], both[1], run, (low, high), window, K)
                    keep = bits_kept(keep, bits, at, both, (live, inside), K)
                pairs = pairs_of_tile((first, step, distance, shift), sides, K, BY_KEY)
                tile = step, some, some < high, keep, pairs, keep
                state = TILE(state, own, others, tile, K, True)
    return state
