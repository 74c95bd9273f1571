# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""Row norms, and dividing ``grad_out`` by two Triton kernels: the host never waits for a factor.

``launches.py`` says what they are launched with.
"""

import triton
import triton.language as tl


# Integers are not specialised, as in merge_triton.py, but for ``rows``: a tenth faster at D = 128.
# Nor are pointers to a few numbers, whose alignment changes.
@triton.jit(do_not_specialize=["largest", "programs"])
def _norm_kernel(
    tensor,
    largest,
    rows,
    programs,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    group = tl.program_id(0) // programs
    # 64 bits: the query heads of a key head are one long run of rows.
    first = (tl.program_id(0) % programs).to(tl.int64) * BLOCK_ROWS
    column = tl.arange(0, BLOCK_WIDTH)
    best = tl.zeros((BLOCK_ROWS,), tl.float32)
    base = tensor + group.to(tl.int64) * rows * WIDTH
    start = first
    while start < rows:
        row = start + tl.arange(0, BLOCK_ROWS)
        cells = (row < rows)[:, None] & (column < WIDTH)[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        x = tl.load(base + at, mask=cells, other=0.0).to(tl.float32)
        squares = tl.sum(x * x, axis=1)
        # Finite rows only: the comparison is false for NaN, too.
        best = tl.where((squares > best) & (squares < float("inf")), squares, best)
        start += programs * BLOCK_ROWS
    tl.atomic_max(largest + group, tl.sqrt(tl.max(best, axis=0)))


@triton.jit(do_not_specialize=["norms", "unscale", "groups", "shift", "programs"])
def _divide_kernel(
    tensor,
    norms,
    unscale,
    groups,
    shift,
    rows,
    programs,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    group = tl.program_id(0) // programs
    bound = tl.load(norms + group) * tl.maximum(2 * tl.load(norms + groups + group), 2.0)
    usable = (bound > 0) & (bound < float("inf"))
    exponent = tl.ceil(tl.log2(tl.where(usable, bound, 1.0))) + shift
    exponent = tl.where(usable, tl.minimum(tl.maximum(exponent, -60.0), 60.0), 0.0)
    # The powers of two are built from their bits, because exp2 need not be exact.
    whole = exponent.to(tl.int32)
    divisor = ((whole + 127) << 23).to(tl.float32, bitcast=True)
    factor = ((127 - whole) << 23).to(tl.float32, bitcast=True)
    if tl.program_id(0) % programs == 0:
        tl.store(unscale + group, divisor)
    column = tl.arange(0, BLOCK_WIDTH)
    base = tensor + group.to(tl.int64) * rows * WIDTH
    start = (tl.program_id(0) % programs).to(tl.int64) * BLOCK_ROWS
    while start < rows:
        row = start + tl.arange(0, BLOCK_ROWS)
        cells = (row < rows)[:, None] & (column < WIDTH)[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        x = tl.load(base + at, mask=cells, other=0.0).to(tl.float32) * factor
        tl.store(base + at, x.to(tensor.dtype.element_ty), mask=cells)
        start += programs * BLOCK_ROWS
