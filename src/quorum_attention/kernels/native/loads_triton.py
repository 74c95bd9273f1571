# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""Reading a block of rows of one head, in one of three ways (READ).

"pointers"; "descriptors", where the config says that they are faster; and "wide": pointers with
64-bit offsets within a tile, for rows that are very far apart.
"""

import triton
import triton.language as tl


@triton.jit
def lane_of(source, b, h, stride_b, stride_h, READ: tl.constexpr):
    """Where a head begins; with a descriptor, the head is given in each load instead."""
    if READ == "descriptors":
        return source
    else:  # noqa: RET505
        return source + b * stride_b + h * stride_h


@triton.jit
def block_rows(
    source,
    b,
    h,
    at,
    stride,
    live,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    READ: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows ``at`` to ``at + ROWS`` of a head, (ROWS, PADDED); columns from WIDTH on are 0.

    Args:
        source: what ``lane_of`` returned.
        live: (ROWS,) which rows to read if MASKED, the others are 0. A descriptor ignores it: only
            rows beyond the tensor are 0.
    """
    if READ == "descriptors":
        return source.load([b.to(tl.int32), h.to(tl.int32), at, 0]).reshape(ROWS, PADDED)
    else:  # noqa: RET505
        columns = tl.arange(0, PADDED)
        rows = tl.arange(0, ROWS)
        if READ == "wide":
            rows = rows.to(tl.int64)
        # Offsets have 64 bits across a tensor, 32 within a tile.
        tile = rows[:, None] * stride + columns[None, :]
        pointers = source + tl.cast(at, tl.int64) * stride + tile
        if MASKED:
            return tl.load(pointers, mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0)
        elif WIDTH != PADDED:  # noqa: RET505
            return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(pointers)
