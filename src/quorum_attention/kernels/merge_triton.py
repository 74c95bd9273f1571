# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""Merging and mending statistics, and adding gradients, as Triton kernels: all read
once and written once.

``triton_launch.py`` launches them, and says why integers are not specialised. lse and
scale pointers are not specialised on alignment either: they are loaded one element at a
time.
"""

import triton
import triton.language as tl


@triton.jit
def _place_of_program(heads, blocks, BLOCK_ROWS: tl.constexpr):
    """Return the batch entry, the head and the rows of this program."""
    program = tl.program_id(0)
    lane = program // blocks
    block = program % blocks
    # Offsets have 64 bits: a tensor may hold more than 2**31 elements.
    b = (lane // heads).to(tl.int64)
    h = (lane % heads).to(tl.int64)
    first_row = block.to(tl.int64) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    return b, h, row


@triton.jit
def _cells_at(
    tensor, b, h, row, column, stride_b, stride_h, stride_r, UNIT: tl.constexpr
):
    """Return pointers to the cells of some rows of a head; strides are multiples of
    ``UNIT`` elements."""
    lane_offset = b * stride_b + h * stride_h
    row_offsets = row * stride_r
    lane = tensor + lane_offset * UNIT
    row_offsets = row_offsets * UNIT
    return lane + row_offsets[:, None] + column[None, :]


@triton.jit
def _live_cells(row, rows, column, WIDTH: tl.constexpr):
    """Return which cells of a block are in the tensor."""
    is_row = row < rows
    is_column = column < WIDTH
    return is_row[:, None] & is_column[None, :]


@triton.jit(
    do_not_specialize=[
        "heads",
        "rows",
        "blocks",
        "out_b",
        "out_h",
        "out_r",
        "out_i_b",
        "out_i_h",
        "out_i_r",
        "lse",
        "lse_i",
        "lse_b",
        "lse_h",
        "lse_r",
        "lse_i_b",
        "lse_i_h",
        "lse_i_r",
    ]
)
def _merge_kernel(
    out,
    lse,
    out_i,
    lse_i,
    heads,
    rows,
    blocks,
    out_b,
    out_h,
    out_r,
    out_i_b,
    out_i_h,
    out_i_r,
    lse_b,
    lse_h,
    lse_r,
    lse_i_b,
    lse_i_h,
    lse_i_r,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Merge (out_i, lse_i) into (out, lse): a block of rows of one head for each
    program."""
    b, h, row = _place_of_program(heads, blocks, BLOCK_ROWS)
    live = row < rows
    lane_offset = b * lse_b + h * lse_h
    lane_offset_i = b * lse_i_b + h * lse_i_h
    lse_at = lse + lane_offset + row * lse_r
    lse_i_at = lse_i + lane_offset_i + row * lse_i_r
    old = tl.load(lse_at, mask=live, other=0.0)
    new = tl.load(lse_i_at, mask=live, other=0.0)
    no_old = old == float("-inf")
    no_new = new == float("-inf")
    # Only differences of lse are exponentiated (of two empty rows: NaN, so they are
    # handled apart).
    difference = tl.abs(old - new)
    larger = tl.where(old > new, old, new)
    odds = tl.exp(-difference)
    merged = larger + tl.log(1.0 + odds)
    merged = tl.where(
        no_old & no_new,
        float("-inf"),
        merged,
    )
    # The smaller weight is computed: 1 minus the larger one would lose its digits.
    smaller_weight = 1.0 / (1.0 + tl.exp(difference))
    smaller_weight = tl.where(
        no_new | no_old,
        0.0,
        smaller_weight,
    )
    old_is_larger = (old >= new) | no_new

    column = tl.arange(0, BLOCK_WIDTH)
    cells = _live_cells(row, rows, column, WIDTH)
    out_at = _cells_at(
        out,
        b,
        h,
        row,
        column,
        out_b,
        out_h,
        out_r,
        UNIT,
    )
    out_i_at = _cells_at(
        out_i,
        b,
        h,
        row,
        column,
        out_i_b,
        out_i_h,
        out_i_r,
        UNIT,
    )
    old_out = tl.load(out_at, mask=cells, other=0.0)
    new_out = tl.load(out_i_at, mask=cells, other=0.0)
    new_out = new_out.to(tl.float32)
    old_is_larger = old_is_larger[:, None]
    larger_out = tl.where(old_is_larger, old_out, new_out)
    smaller_out = tl.where(old_is_larger, new_out, old_out)
    change = smaller_out - larger_out
    row_weight = smaller_weight[:, None]
    merged_out = larger_out + row_weight * change
    tl.store(out_at, merged_out, mask=cells)
    # Warps share rows: all of them must have read the old lse before one of them
    # replaces it.
    tl.debug_barrier()
    tl.store(lse_at, merged, mask=live)


@triton.jit(
    do_not_specialize=[
        "unscale",
        "overflow",
        "alpha",
        "heads",
        "rows",
        "blocks",
        "target_b",
        "target_h",
        "target_r",
        "source_b",
        "source_h",
        "source_r",
        "unscale_b",
        "unscale_h",
        "shared",
    ]
)
def _add_kernel(
    target,
    source,
    unscale,
    overflow,
    alpha,
    heads,
    rows,
    blocks,
    target_b,
    target_h,
    target_r,
    source_b,
    source_h,
    source_r,
    unscale_b,
    unscale_h,
    shared,
    SCALED: tl.constexpr,
    CHECKED: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Add alpha * unscale * source to target: a block of rows of one head for each
    program."""
    b, h, row = _place_of_program(heads, blocks, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    cells = _live_cells(row, rows, column, WIDTH)
    target_at = _cells_at(
        target,
        b,
        h,
        row,
        column,
        target_b,
        target_h,
        target_r,
        UNIT,
    )
    source_at = _cells_at(
        source,
        b,
        h,
        row,
        column,
        source_b,
        source_h,
        source_r,
        UNIT,
    )
    part = tl.load(source_at, mask=cells, other=0.0)
    part = part.to(tl.float32)
    factor = alpha
    key_head = h // shared
    key_lane = b * unscale_b + key_head * unscale_h
    if SCALED:
        factor *= tl.load(unscale + key_lane)
    old = tl.load(target_at, mask=cells, other=0.0)
    tl.store(
        target_at,
        old + part * factor,
        mask=cells,
    )
    if CHECKED:
        # The comparison is false for NaN, too.
        is_finite = tl.abs(part) < float("inf")
        bad = tl.max(tl.where(is_finite, 0, 1), axis=1)
        flag_at = overflow + key_lane
        tl.atomic_or(
            flag_at + 0 * row,
            bad,
            mask=bad > 0,
        )


@triton.jit(
    do_not_specialize=[
        "lse",
        "out",
        "heads",
        "rows",
        "blocks",
        "lse_b",
        "lse_h",
        "lse_r",
        "out_b",
        "out_h",
        "out_r",
    ]
)
def _mend_kernel(
    lse,
    out,
    heads,
    rows,
    blocks,
    lse_b,
    lse_h,
    lse_r,
    out_b,
    out_h,
    out_r,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Make lse NaN in rows where it is -inf and the output is NaN: a block of rows of
    one head for each program."""
    b, h, row = _place_of_program(heads, blocks, BLOCK_ROWS)
    live = row < rows
    lse_lane = b * lse_b + h * lse_h
    out_lane = b * out_b + h * out_h
    lse_at = lse + lse_lane + row * lse_r
    row_lse = tl.load(lse_at, mask=live, other=0.0)
    is_empty = row_lse == float("-inf")
    # Outputs are read in rows without keys alone, so hardly ever.
    first_column = tl.load(
        out + out_lane + row * out_r,
        mask=is_empty,
        other=0.0,
    )
    first_column = first_column.to(tl.float32)
    is_nan = first_column != first_column
    tl.store(lse_at, float("nan"), mask=is_nan)
