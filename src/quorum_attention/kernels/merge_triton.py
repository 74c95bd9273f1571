# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""The merge of statistics as one Triton kernel: everything read once and written once."""

import torch
import triton
import triton.language as tl

# Elements of one program's block: enough for full memory bandwidth, few enough for registers.
_BLOCK_ELEMENTS = 4096


def merge_triton_(
    out: torch.Tensor, lse: torch.Tensor, out_i: torch.Tensor, lse_i: torch.Tensor
) -> None:
    """Merge (out_i, lse_i) into (out, lse) in place, allocating nothing.

    Args:
        out: (b, h, rows, dv) fp32; any strides, the last dimension contiguous.
        lse: (b, h, rows) fp32, any strides.
        out_i: as ``out``, fp16, bf16 or fp32.
        lse_i: as ``lse``.
    """
    batch, heads, rows, width = out.shape
    total = batch * heads * rows
    if total == 0:
        return
    block_width = triton.next_power_of_2(max(1, width))
    block_rows = max(1, _BLOCK_ELEMENTS // block_width)
    # All programs on the first grid axis, the only one that takes more than 65,535.
    grid = (triton.cdiv(total, block_rows),)
    with torch.cuda.device_of(out):
        _merge_kernel[grid](
            out,
            lse,
            out_i,
            lse_i,
            total,
            heads,
            rows,
            *out.stride()[:3],
            *lse.stride(),
            *out_i.stride()[:3],
            *lse_i.stride(),
            WIDTH=width,
            BLOCK_ROWS=block_rows,
            BLOCK_WIDTH=block_width,
        )


@triton.jit
def _merge_kernel(
    out,
    lse,
    out_i,
    lse_i,
    total,
    heads,
    rows,
    out_b,
    out_h,
    out_r,
    lse_b,
    lse_h,
    lse_r,
    out_i_b,
    out_i_h,
    out_i_r,
    lse_i_b,
    lse_i_h,
    lse_i_r,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    # 64-bit throughout: a state may hold more than 2**31 elements.
    index = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = index < total
    row = index % rows
    b = index // rows // heads
    h = index // rows % heads

    lse_at = lse + b * lse_b + h * lse_h + row * lse_r
    old = tl.load(lse_at, mask=live, other=0.0)
    new = tl.load(lse_i + b * lse_i_b + h * lse_i_h + row * lse_i_r, mask=live, other=0.0)
    no_old = old == float("-inf")
    no_new = new == float("-inf")
    # Differences of lse only, never exp(lse); two empty rows would make them NaN.
    weight = tl.where(no_new, 0.0, 1.0 / (1.0 + tl.exp(old - new)))
    larger = tl.where(old > new, old, new)
    merged = larger + tl.log(1.0 + tl.exp(-tl.abs(old - new)))
    column = tl.arange(0, BLOCK_WIDTH)
    cells = live[:, None] & (column < WIDTH)[None, :]
    out_at = out + (b * out_b + h * out_h + row * out_r)[:, None] + column[None, :]
    out_i_at = out_i + (b * out_i_b + h * out_i_h + row * out_i_r)[:, None] + column[None, :]
    a = tl.load(out_at, mask=cells, other=0.0)
    step = tl.load(out_i_at, mask=cells, other=0.0).to(tl.float32) - a
    w = weight[:, None]
    # As torch.lerp: exact at both ends.
    tl.store(out_at, tl.where(w < 0.5, a + w * step, a + step - step * (1.0 - w)), mask=cells)
    # Warps share rows: all of them must have read the old lse before one of them replaces it.
    tl.debug_barrier()
    tl.store(lse_at, tl.where(no_old & no_new, float("-inf"), merged), mask=live)
