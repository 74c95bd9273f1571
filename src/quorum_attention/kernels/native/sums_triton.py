# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""Sums over the columns of rows, as one Triton kernel: delta, its gap, and the largest
norms."""

import triton
import triton.language as tl

from quorum_attention.kernels.native.tiles_triton import (
    NOT_SPECIALIZED,
    lane_of,
    load_rows,
)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def sums_kernel(
    rows,
    factors,
    products,
    norms,
    heads,
    group,
    n_rows,
    row_strides,
    factor_strides,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PRODUCTS: tl.constexpr,
    ROUNDING: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Write sums of ``rows`` (b, h, n, d); see ``sums.launch_sums``.

    Args:
        PRODUCTS: ``products`` (b, h, n) become rowsum(rows * factors); with ROUNDING
            what rounding ``factors`` to the dtype of ``rows`` adds to that.
        NORMS: ``norms`` (b, h / group) are raised to the largest squared norm of rows.
    """
    n_blocks = tl.cdiv(n_rows, BLOCK)
    program = tl.program_id(0)
    number = program // n_blocks
    lane = lane_of(number, heads)
    first_row = (program % n_blocks) * BLOCK
    numbers = first_row + tl.arange(0, BLOCK)
    r = load_rows(rows, row_strides, lane, numbers, n_rows, WIDTH, PADDED)
    r = r.to(tl.float32)
    if PRODUCTS:
        f = load_rows(factors, factor_strides, lane, numbers, n_rows, WIDTH, PADDED)
        f = f.to(tl.float32)
        if ROUNDING:
            rounded = f.to(rows.dtype.element_ty)
            f = rounded.to(tl.float32) - f
        row_products = tl.sum(r * f, 1)
        products_of_head = products + number.to(tl.int64) * n_rows
        pointers = products_of_head + numbers.to(tl.int64)
        tl.store(pointers, row_products, mask=numbers < n_rows)
    if NORMS:
        tl.atomic_max(norms + number // group, _largest_square(r))


@triton.jit
def _largest_square(rows):
    """Return the largest squared norm of the rows that are finite: others are so
    however they are scaled, and would scale the rest to 0. (The comparison is false for
    NaN, too.)"""
    squares = tl.sum(rows * rows, 1)
    is_finite = squares < float("inf")
    finite_squares = tl.where(is_finite, squares, 0.0)
    return tl.max(finite_squares, 0)
