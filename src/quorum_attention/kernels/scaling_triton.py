# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""The scaling of a backward (``scaling.py``) as Triton kernels: one reads the norms of
rows, one divides. ``triton_launch.py`` launches them.
"""

import triton
import triton.language as tl

from quorum_attention.kernels.merge_triton import (
    _cells_at,
    _live_cells,
    _place_of_program,
)


@triton.jit(
    do_not_specialize=[
        "norms",
        "heads",
        "rows",
        "blocks",
        "tensor_b",
        "tensor_h",
        "tensor_r",
        "norms_b",
        "norms_h",
        "shared",
    ]
)
def _norms_kernel(
    tensor,
    norms,
    heads,
    rows,
    blocks,
    tensor_b,
    tensor_h,
    tensor_r,
    norms_b,
    norms_h,
    shared,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Raise the norm of a key head to that of the largest finite row: a block of rows
    of one head for each program."""
    b, h, row = _place_of_program(heads, blocks, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    cells = _live_cells(row, rows, column, WIDTH)
    tensor_at = _cells_at(
        tensor,
        b,
        h,
        row,
        column,
        tensor_b,
        tensor_h,
        tensor_r,
        UNIT,
    )
    numbers = tl.load(tensor_at, mask=cells, other=0.0)
    numbers = numbers.to(tl.float32)
    squares = tl.sum(numbers * numbers, axis=1)
    # The comparison is false for NaN, too.
    is_finite = squares < float("inf")
    finite_squares = tl.where(is_finite, squares, 0.0)
    largest = tl.sqrt(tl.max(finite_squares, axis=0))
    key_head = h // shared
    tl.atomic_max(norms + b * norms_b + key_head * norms_h, largest)


@triton.jit(
    do_not_specialize=[
        "grad_norm",
        "value_norm",
        "unscale",
        "log2_scale",
        "heads",
        "rows",
        "blocks",
        "grad_b",
        "grad_h",
        "grad_r",
        "norms_b",
        "norms_h",
        "unscale_b",
        "unscale_h",
        "shared",
    ]
)
def _divide_kernel(
    grad_out,
    grad_norm,
    value_norm,
    unscale,
    log2_scale,
    heads,
    rows,
    blocks,
    grad_b,
    grad_h,
    grad_r,
    norms_b,
    norms_h,
    unscale_b,
    unscale_h,
    shared,
    LARGEST_EXPONENT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Divide grad_out by the power of two of its key head, which goes to unscale: a
    block of rows of one head for each program."""
    b, h, row = _place_of_program(heads, blocks, BLOCK_ROWS)
    key_head = h // shared
    norm_lane = b * norms_b + key_head * norms_h
    largest_grad = tl.load(grad_norm + norm_lane)
    largest_value = tl.load(value_norm + norm_lane)
    bound = largest_grad * tl.maximum(2.0 * largest_value, 2.0)
    # An fp32 number's exponent, as frexp gives it; that of infinity is the largest.
    biased_exponent = bound.to(tl.int32, bitcast=True) >> 23
    exponent = biased_exponent - 126 + log2_scale
    exponent = tl.maximum(exponent, -LARGEST_EXPONENT)
    exponent = tl.minimum(exponent, LARGEST_EXPONENT)
    exponent = tl.where(bound > 0.0, exponent, 0)
    divisor = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    # All programs of a key head write the same number.
    tl.store(unscale + b * unscale_b + key_head * unscale_h, divisor)

    column = tl.arange(0, BLOCK_WIDTH)
    cells = _live_cells(row, rows, column, WIDTH)
    grad_at = _cells_at(
        grad_out,
        b,
        h,
        row,
        column,
        grad_b,
        grad_h,
        grad_r,
        UNIT,
    )
    numbers = tl.load(grad_at, mask=cells, other=0.0)
    divided = numbers.to(tl.float32) * factor
    tl.store(grad_at, divided, mask=cells)
