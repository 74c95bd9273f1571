# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""What the forward and the backward of a task share: rows, scores, kept pairs, and the
walk.

A program has a block of rows that *stays*, and walks the runs of rows of the other side
(of a table from ``runs.py``), which *move* past in tiles. A run has a clear part, whose
pairs need no test, and ragged parts at its ends. Rows are read by pointers, or by
descriptors where the config says that they are faster.

Values that belong together are tuples, which functions unpack at their top:

* ``strides``: of a tensor, by batch entry, head and row.
* ``lane``: (batch entry, head), int64.
* ``head_rows``: what ``rows_of_head`` returns: rows of a head that move past.
* ``run``: (first, last) of the staying rows, exclusive; diagonal; distance
  (``EntryColumn``).
* ``part``: (first, last) of the moving rows of a part of a run, exclusive.
* ``window``: (left, right).
* ``scores``: (scale, scale / ln 2, soft cap, slope), of a head.
* ``bias``: (pointer to a head, stride of rows, stride of columns, its first row and
  column).
* ``dropout``: what ``dropped_pairs`` reads.
* ``pairs``: of a tile, what ``pairs_of_tile`` returns.
* ``tile``: (first moving row, moving rows (n,), which of them to read, which pairs to
  keep, pairs, which pointers of the mask to read).

K is a ``launch.KernelConstants``.
"""

import triton
import triton.language as tl

from quorum_attention.kernels.native.columns import EntryColumn
from quorum_attention.kernels.native.dropout_triton import dropped_pairs

# All columns, in their order.
LOW, HIGH, START, BEGIN, END, STOP, DIAGONAL, DISTANCE, MIXED, SHIFT = map(
    tl.constexpr, map(int, EntryColumn)
)
N_COLUMNS = tl.constexpr(len(EntryColumn))

LOG2_E = tl.constexpr(1.4426950408889634)

NOT_SPECIALIZED = [
    "starts",
    "entries",
    "norms",
    "heads",
    "group",
    "key_lanes",
    "n_queries",
    "n_keys",
    "n_rows",
    "n_blocks",
    "window_left",
    "window_right",
    "bias_row",
    "bias_column",
    "seed_low",
    "seed_high",
    "threshold",
    "first_head",
    "first_entry",
]
"""Arguments of the kernels that would only make Triton compile again for other
lengths."""


@triton.jit
def row_pointers(source, strides, lane, rows, PADDED: tl.constexpr):
    """Pointers to rows of a head of (b, h, n, d): (rows, PADDED).

    Offsets that may span a whole tensor have 64 bits.
    """
    entry, head = lane
    entry_stride, head_stride, row_stride = strides
    source += entry * entry_stride + head * head_stride
    wide_rows = rows.to(tl.int64)
    pointers = source + wide_rows[:, None] * row_stride
    columns = tl.arange(0, PADDED)
    return pointers + columns[None, :]


@triton.jit
def cells_there_are(rows, n_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Which of the cells of ``row_pointers`` there are: (rows, PADDED)."""
    is_row = (rows < n_rows)[:, None]
    columns = tl.arange(0, PADDED)
    is_column = (columns < WIDTH)[None, :]
    return is_row & is_column


@triton.jit
def load_rows(
    source, strides, lane, rows, n_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    """Rows of a head, (rows, PADDED), and 0 where there are none."""
    live = cells_there_are(rows, n_rows, WIDTH, PADDED)
    pointers = row_pointers(source, strides, lane, rows, PADDED)
    return tl.load(pointers, mask=live, other=0.0)


@triton.jit
def store_rows(
    target, strides, lane, rows, n_rows, block, WIDTH: tl.constexpr, K: tl.constexpr
):
    """Write a block to rows of a head, or with ADD add it to them."""
    pointers = row_pointers(target, strides, lane, rows, K.PADDED)
    live = cells_there_are(rows, n_rows, WIDTH, K.PADDED)
    if K.ADD:
        stored = tl.load(pointers, mask=live, other=0.0)
        block += stored.to(tl.float32)
    tl.store(pointers, block.to(target.dtype.element_ty), mask=live)


@triton.jit
def params_of_head(lane, scaling, bias, bits, K: tl.constexpr):
    """(scores, bias, mask bits) of a head, as tiles read them.

    Args:
        scaling: (scale, soft cap, slopes).
        bias: (pointer, strides by entry, head, row and column, its first row and
            column).
        bits: (pointer, stride by entry, stride by head).
    """
    entry, head = lane
    scale, softcap, slopes = scaling
    bias, bias_strides, bias_row, bias_column = bias
    bias_entry_stride, bias_head_stride, bias_row_stride, bias_column_stride = (
        bias_strides
    )
    mask_bits, bits_entry_stride, bits_head_stride = bits
    slope = 0.0
    if K.ALIBI:
        slope = tl.load(slopes + head)
    if K.BIAS:
        bias += entry * bias_entry_stride + head * bias_head_stride
    if K.BITS:
        mask_bits += entry * bits_entry_stride + head * bits_head_stride
    scores = (scale, scale * LOG2_E, softcap, slope)
    bias = (bias, bias_row_stride, bias_column_stride, bias_row, bias_column)
    return scores, bias, mask_bits


@triton.jit
def rows_of_head(source, strides, lane, K: tl.constexpr):
    """(where a head begins, lane, stride of rows), for ``load_block``; a descriptor is
    given the head in each load."""
    entry, head = lane
    entry_stride, head_stride, row_stride = strides
    if not K.DESCRIBED:
        source = source + entry * entry_stride + head * head_stride
    return source, lane, row_stride


@triton.jit
def load_block(
    head_rows, tile, WIDTH: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr
):
    """The moving rows of a tile, (rows, PADDED); columns from WIDTH on are 0.

    If MASKED, so are rows that the tile does not read. A descriptor does not know of
    these: only rows beyond the tensor are 0.
    """
    source, lane, stride = head_rows
    first, rows, live, _, _, _ = tile
    entry, head = lane
    if K.DESCRIBED:
        described = source.load([entry.to(tl.int32), head.to(tl.int32), first, 0])
        return described.reshape(rows.shape[0], K.PADDED)
    else:  # noqa: RET505
        columns = tl.arange(0, K.PADDED)
        rows = tl.arange(0, rows.shape[0])
        # Offsets have 64 bits across a tensor, 32 within a tile.
        offsets = rows[:, None] * stride + columns[None, :]
        first_row = source + tl.cast(first, tl.int64) * stride
        pointers = first_row + offsets
        if MASKED:
            is_row = live[:, None]
            is_column = (columns < WIDTH)[None, :]
            return tl.load(pointers, mask=is_row & is_column, other=0.0)
        elif WIDTH != K.PADDED:  # noqa: RET505
            is_column = (columns < WIDTH)[None, :]
            return tl.load(pointers, mask=is_column, other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def scores_of_products(s, scores, pairs, live, K: tl.constexpr):
    """Scores from products: scaled, then soft-capped, then ALiBi and the mask.

    Args:
        s: products.
        live: which pointers of the mask to read.

    Returns:
        scores, and the derivative of the soft cap (1 without one).
    """
    scale, _, softcap, slope = scores
    distances, bias_pointers, _ = pairs
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
        s -= slope * tl.abs(distances).to(tl.float32)
    if K.BIAS:
        bias = tl.load(bias_pointers, mask=live, other=0.0)
        s += bias.to(tl.float32)
    return s, softcap_grad


@triton.jit
def kept_of_query_run(rows, columns, run, part, window, K: tl.constexpr):
    """Which pairs of a tile belong to a part of a run of queries; rows are queries,
    columns keys."""
    column_low, column_high, diagonal, distance = run
    row_low, row_high = part
    window_left, window_right = window
    keep = (rows >= row_low) & (rows < row_high)
    keep = keep & (columns >= column_low)
    keep = keep & (columns < column_high)
    # The difference is compared; a sum with the diagonal might not fit 32 bits.
    keep = keep & (columns - rows <= diagonal)
    if K.WINDOW:
        difference = rows - columns
        keep = keep & (difference + distance <= window_left)
        keep = keep & (difference + distance >= -window_right)
    return keep


@triton.jit
def kept_of_key_run(rows, columns, run, part, window, K: tl.constexpr):
    """Which pairs of rows (m, 1) and columns (1, n) belong to a part of a run of keys.

    The first and the last key of each row are computed, so that a pair takes two
    comparisons. (With the roles exchanged ``kept_of_query_run`` is quicker,
    docs/native.md.)
    """
    row_low, row_high, diagonal, distance = run
    column_low, column_high = part
    window_left, window_right = window
    # Sums with NO_DIAGONAL or UNLIMITED do not fit 32 bits; what they are cut off to
    # does.
    wide = rows.to(tl.int64)
    high = tl.minimum(wide + diagonal + 1, column_high)
    low = column_low
    if K.WINDOW:
        high = tl.minimum(high, wide + distance + window_right + 1)
        low = tl.maximum(wide + distance - window_left, column_low)
        low = tl.minimum(low, column_high).to(tl.int32)
    inside = (rows >= row_low) & (rows < row_high)
    high = tl.maximum(high, column_low)
    high = tl.where(inside, high, column_low).to(tl.int32)
    return (columns >= low) & (columns < high)


@triton.jit
def kept_by_bits(keep, bits, entry, rows, columns, K: tl.constexpr):
    """Which of the pairs ``keep`` are kept by bits too.

    Args:
        bits: the mask bits, int32, of all partial blocks of a lane: 128 rows of four
            words, a bit for each key.
        entry: the run's entry, which says whether it is a partial block, and where its
            mask bits begin.
        rows, columns: local positions of queries and keys as they lie in the tile.
            Blocks divide them at multiples of 128.
    """
    if K.BITS:
        mixed = tl.load(entry + MIXED)
        word_of_row = tl.load(entry + SHIFT) + (rows & 127) * 4
        word_of_pair = word_of_row + ((columns & 127) >> 5)
        is_read = keep & (mixed != 0)
        word = tl.load(bits + word_of_pair, mask=is_read, other=0)
        bit = (word >> (columns & 31)) & 1
        is_set = bit != 0
        keep = keep & (is_set | (mixed == 0))
    return keep


@triton.jit
def pairs_of_tile(place, bias, dropout, K: tl.constexpr, BY_KEY: tl.constexpr):
    """(global distances, pointers to the additive mask, dropped pairs) of a tile (rows,
    keys); with BY_KEY (keys, rows).

    Args:
        place: (first staying row, first moving row, distance, shift): local positions;
            ``EntryColumn``.
    """
    if BY_KEY:
        first_key, first_row, distance, shift = place
        rows = tl.arange(0, K.BLOCK_M)[None, :]
        keys = tl.arange(0, K.BLOCK_N)[:, None]
    else:
        first_row, first_key, distance, shift = place
        rows = tl.arange(0, K.BLOCK_M)[:, None]
        keys = tl.arange(0, K.BLOCK_N)[None, :]
    pointers, row_stride, column_stride, bias_row, bias_column = bias
    if K.BIAS:
        mask_rows = tl.cast(first_row, tl.int64) - bias_row + rows
        row_offsets = mask_rows * row_stride
        mask_columns = tl.cast(first_key, tl.int64) - bias_column + keys
        column_offsets = mask_columns * column_stride
        pointers += row_offsets + column_offsets
    is_dropped = 0
    if K.DROPOUT:
        query_positions = first_row + tl.arange(0, K.BLOCK_M) + shift
        first_key_position = first_key + shift - distance
        is_dropped = dropped_pairs(
            query_positions, first_key_position, dropout, BY_KEY, K
        )
    distances = (first_row + rows) - (first_key + keys) + distance
    return distances, pointers, is_dropped


@triton.jit
def walk(
    state,
    staying,
    moving,
    table,
    masking,
    TILE: tl.constexpr,
    BY_KEY: tl.constexpr,
    K: tl.constexpr,
):
    """``state`` after all runs of a block of queries, or with BY_KEY of a block of
    keys.

    Args:
        staying: what TILE reads of the block's rows.
        moving: what TILE reads of the other side.
        table: (block, starts, entries, n_rows): the block's number; the table, by
            blocks; rows of the call along the blocks.
        masking: (window, mask bits, bias, dropout) of a head.
        TILE: ``TILE(state, staying, moving, tile, K, MASKED)`` is the state after one
            more tile.
    """
    block, starts, entries, n_rows = table
    window, bits, bias, dropout = masking
    SIDE: tl.constexpr = K.BLOCK_N if BY_KEY else K.BLOCK_M
    STEP: tl.constexpr = K.BLOCK_M if BY_KEY else K.BLOCK_N
    # Only a window has a ragged part before a block of queries.
    N_RAGGED: tl.constexpr = 2 if K.WINDOW or BY_KEY else 1
    # The ragged part at the diagonal comes first: before the clear part, or after it.
    BEFORE: tl.constexpr = 0 if BY_KEY else 1
    first = block * SIDE
    rows = first + tl.arange(0, SIDE)
    live = (rows < n_rows)[:, None]
    steps = tl.arange(0, STEP)
    first_entry = tl.load(starts + block)
    stop_entry = tl.load(starts + block + 1)
    for index in range(first_entry, stop_entry):
        entry = entries + index * N_COLUMNS
        distance = tl.load(entry + DISTANCE)
        row_low = tl.load(entry + LOW)
        row_high = tl.load(entry + HIGH)
        diagonal = tl.load(entry + DIAGONAL)
        run = (row_low, row_high, diagonal, distance)
        start = tl.load(entry + START)
        begin = tl.load(entry + BEGIN)
        end = tl.load(entry + END)
        stop = tl.load(entry + STOP)
        shift = 0
        if K.DROPOUT:
            shift = tl.load(entry + SHIFT)

        for step in tl.range(begin, end, STEP):
            moving_positions = step + steps
            place = (first, step, distance, shift)
            pairs = pairs_of_tile(place, bias, dropout, K, BY_KEY)
            tile = (step, moving_positions, True, True, pairs, live)
            state = TILE(state, staying, moving, tile, K, False)

        for number in range(N_RAGGED):
            low = tl.where(number == BEFORE, start, end)
            high = tl.where(number == BEFORE, begin, stop)
            part = (low, high)
            for step in tl.range(low, high, STEP, num_stages=K.RAGGED):
                moving_positions = step + steps
                if BY_KEY:
                    queries = moving_positions[None, :]
                    keys = rows[:, None]
                    keep = kept_of_query_run(queries, keys, run, part, window, K)
                else:
                    queries = rows[:, None]
                    keys = moving_positions[None, :]
                    keep = kept_of_key_run(queries, keys, run, part, window, K)
                keep = kept_by_bits(keep, bits, entry, queries, keys, K)
                place = (first, step, distance, shift)
                pairs = pairs_of_tile(place, bias, dropout, K, BY_KEY)
                inside = moving_positions < high
                tile = (step, moving_positions, inside, keep, pairs, keep)
                state = TILE(state, staying, moving, tile, K, True)
    return state


@triton.jit
def lane_of(number, heads):
    """(batch entry, head) of a lane, by its number."""
    entry = number // heads
    head = number % heads
    return entry.to(tl.int64), head.to(tl.int64)


@triton.jit
def block_of_program(n_blocks, heads, group):
    """(block of queries, its lane, the lane of their keys) of a program.

    The last blocks of a causal task take longest, so they start first.
    """
    program = tl.program_id(0)
    block = n_blocks - 1 - program % n_blocks
    number = program // n_blocks
    entry = (number // heads).to(tl.int64)
    head = number % heads
    lane = (entry, head.to(tl.int64))
    key_lane = (entry, (head // group).to(tl.int64))
    return block, lane, key_lane


@triton.jit
def walk_keys(
    state,
    staying,
    lanes,
    rows,
    params,
    table,
    dropout,
    TILE: tl.constexpr,
    K: tl.constexpr,
):
    """``walk`` of a block of queries.

    Args:
        lanes: of the queries, and of their keys.
        rows: (key, its strides, value, its strides).
        params: (scaling, bias, bits) as ``params_of_head`` takes them.
    """
    lane, key_lane = lanes
    key, key_strides, value, value_strides = rows
    scaling, bias, bits = params
    scores, head_bias, head_bits = params_of_head(lane, scaling, bias, bits, K)
    keys = rows_of_head(key, key_strides, key_lane, K)
    values = rows_of_head(value, value_strides, key_lane, K)
    _, window_left, window_right = bits
    masking = ((window_left, window_right), head_bits, head_bias, dropout)
    return walk(state, staying, (keys, values, scores), table, masking, TILE, False, K)


@triton.jit
def lse_pointers(lse, strides, lane, rows):
    """Pointers to rows of a head of lse (b, h, n)."""
    entry, head = lane
    entry_stride, head_stride, row_stride = strides
    lse += entry * entry_stride + head * head_stride
    return lse + rows.to(tl.int64) * row_stride
