# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""Merging statistics and adding gradients as Triton kernels: all read once and written once.

Triton compiles a kernel again for every combination of integer arguments that are 1, multiples of
16, or neither; each compilation takes 0.7 s. These kernels gain little from that, so the integers
are declared ``do_not_specialize``. Strides are passed as multiples of a common unit that is a
compile-time constant: that is enough for rows to be read and written in words of 16 bytes. Nor
does the alignment of statistics and factors count, which are read one by one.
"""

import math

import torch
import triton
import triton.language as tl

from quorum_attention.kernels import ahead

# Rows of the tensors that kernels are compiled for ahead.
_ROWS = 128
# Elements of a program's block: enough for full memory bandwidth, few enough for the registers.
_BLOCK_ELEMENTS = 4096
# Possible units of the strides, in elements, the largest first.
_UNITS = (16, 8, 4, 2)


def _block(width: int) -> tuple[int, int]:
    """Rows and columns of a block. (Triton's own helpers cost the host 4 us a call.)"""
    block_width = 1 << max(0, width - 1).bit_length()
    return max(1, _BLOCK_ELEMENTS // block_width), block_width


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The first three strides of (b, h, rows, d); 0 in dimensions of size 1."""
    both = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    return tuple(stride if n > 1 else 0 for n, stride in both)


def _unit(strides: tuple[int, ...]) -> int:
    together = math.gcd(*strides)
    return next((unit for unit in _UNITS if together % unit == 0), 1)


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
    if lse.numel() == 0:
        return
    if ahead.RUNNING:
        ahead.wait("merge")
    programs, arguments, constants = _to_merge(out, lse, out_i, lse_i)
    with torch.cuda.device_of(out):
        # All programs are on the first grid axis, the only one that can have more than 65,535.
        _merge_kernel[(programs,)](*arguments, **constants)


def compile_merge(dtype: torch.dtype, width: int):
    """What ``merge_triton_`` launches for parts of ``dtype`` and ``width``, compiled."""
    out, lse = torch.empty(1, 1, _ROWS, width), torch.empty(1, 1, _ROWS)
    programs, arguments, constants = _to_merge(out, lse, out.to(dtype), lse)
    return _merge_kernel.warmup(*arguments, grid=(programs,), **constants)


def _to_merge(out, lse, out_i, lse_i):
    """(programs, arguments, compile-time constants) of a launch."""
    batch, heads, rows, width = out.shape
    block_rows, block_width = _block(width)
    blocks = -(-rows // block_rows)
    strides = _strides(out) + _strides(out_i)
    unit = _unit(strides)
    arguments = (
        out, lse, out_i, lse_i, heads, rows, blocks, *(stride // unit for stride in strides),
        *lse.stride(), *lse_i.stride(),
    )  # fmt: skip
    constants = {
        "UNIT": unit, "WIDTH": width, "BLOCK_ROWS": block_rows, "BLOCK_WIDTH": block_width,
    }  # fmt: skip
    return batch * heads * blocks, arguments, constants


@triton.jit(
    do_not_specialize=[
        "heads", "rows", "blocks", "out_b", "out_h", "out_r", "out_i_b", "out_i_h", "out_i_r",
        "lse", "lse_i", "lse_b", "lse_h", "lse_r", "lse_i_b", "lse_i_h", "lse_i_r",
    ]
)  # fmt: skip
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
    # Offsets have 64 bits: a tensor may hold more than 2**31 elements.
    lane = tl.program_id(0) // blocks
    b = (lane // heads).to(tl.int64)
    h = (lane % heads).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < rows

    lse_at = lse + b * lse_b + h * lse_h + row * lse_r
    old = tl.load(lse_at, mask=live, other=0.0)
    new = tl.load(lse_i + b * lse_i_b + h * lse_i_h + row * lse_i_r, mask=live, other=0.0)
    no_old = old == float("-inf")
    no_new = new == float("-inf")
    # Only differences of lse are exponentiated (of two empty rows: NaN, so they are handled apart).
    # The smaller weight is computed: 1 minus the larger one would lose its digits.
    less = tl.where(no_new | no_old, 0.0, 1.0 / (1.0 + tl.exp(tl.abs(old - new))))
    nearer = (old >= new) | no_new
    larger = tl.where(old > new, old, new)
    merged = larger + tl.log(1.0 + tl.exp(-tl.abs(old - new)))
    column = tl.arange(0, BLOCK_WIDTH)
    cells = live[:, None] & (column < WIDTH)[None, :]
    out += (b * out_b + h * out_h) * UNIT
    out_i += (b * out_i_b + h * out_i_h) * UNIT
    out_at = out + (row * out_r * UNIT)[:, None] + column[None, :]
    out_i_at = out_i + (row * out_i_r * UNIT)[:, None] + column[None, :]
    a = tl.load(out_at, mask=cells, other=0.0)
    a_i = tl.load(out_i_at, mask=cells, other=0.0).to(tl.float32)
    more, other = tl.where(nearer[:, None], a, a_i), tl.where(nearer[:, None], a_i, a)
    tl.store(out_at, more + less[:, None] * (other - more), mask=cells)
    # Warps share rows: all of them must have read the old lse before one of them replaces it.
    tl.debug_barrier()
    tl.store(lse_at, tl.where(no_old & no_new, float("-inf"), merged), mask=live)


def add_triton_(
    targets: tuple[torch.Tensor, ...],
    sources: tuple[torch.Tensor, ...],
    alpha: float,
    unscale: torch.Tensor | None,
    overflow: torch.Tensor | None,
) -> None:
    """``target += alpha * unscale * source`` in place for up to three pairs in one launch.

    A launch costs the host as much as adding a small gradient costs the device.

    Args:
        targets: (b, h, rows, d) fp32; any strides, the last dimension contiguous.
        sources: as ``targets``, fp16, bf16 or fp32, one dtype.
        unscale: (b or 1, h / g) fp32: one factor for g neighbouring heads; None is 1.
        overflow: shaped like ``unscale``, int32; set to 1 where any element of a source is not
            finite; None: not checked.
    """
    if ahead.RUNNING:
        ahead.wait("add")
    programs, arguments = _to_add(targets, sources, alpha, unscale, overflow)
    if programs:
        with torch.cuda.device_of(targets[0]):
            _add_kernel[(programs,)](*arguments)


def compile_add(dtype: torch.dtype, widths: tuple[int, ...], scaled: bool):
    """What ``add_triton_`` launches for gradients of ``dtype`` and ``widths``, compiled.

    ``scaled``: with factors and flags.
    """
    targets = tuple(torch.empty(1, 1, _ROWS, width) for width in widths)
    sources = tuple(target.to(dtype) for target in targets)
    unscale = torch.empty(1, 1) if scaled else None
    overflow = torch.empty(1, 1, dtype=torch.int32) if scaled else None
    programs, arguments = _to_add(targets, sources, 1.0, unscale, overflow)
    return _add_kernel.warmup(*arguments, grid=(programs,))


def _to_add(targets, sources, alpha, unscale, overflow):
    """(programs, arguments) of a launch."""
    by_head = unscale if overflow is None else overflow
    assert unscale is None or by_head is None or unscale.stride() == by_head.stride()
    arguments: list[object] = []
    widths, blocks = [], []
    for i in range(3):
        # A missing pair gets no blocks, so its pointers are never read.
        target, source = (targets[i], sources[i]) if i < len(targets) else (targets[0], sources[0])
        batch, heads, rows, width = target.shape
        block_rows, block_width = _block(width)
        each = -(-rows // block_rows)
        unscale_b = unscale_h = 0
        shared = 1
        if by_head is not None:
            unscale_b = by_head.stride(0) if by_head.shape[0] > 1 else 0
            unscale_h, shared = by_head.stride(1), max(1, heads // max(1, by_head.shape[1]))
        strides = _strides(target) + _strides(source)
        unit = _unit(strides)
        widths += [unit, width, block_rows, block_width]
        blocks.append(batch * heads * each if i < len(targets) else 0)
        arguments += [
            target, source, max(1, heads), rows, max(1, each),
            *(stride // unit for stride in strides), unscale_b, unscale_h, shared,
        ]  # fmt: skip
    first = targets[0]
    arguments += [
        blocks[0],
        blocks[0] + blocks[1],
        first if unscale is None else unscale,
        first if overflow is None else overflow,
        alpha,
        unscale is not None,
        overflow is not None,
        *widths,
    ]
    return sum(blocks), arguments


@triton.jit
def _add_block(
    block,
    target,
    source,
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
    unscale,
    overflow,
    alpha,
    SCALED: tl.constexpr,
    CHECKED: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    lane = block // blocks
    b = (lane // heads).to(tl.int64)
    h = (lane % heads).to(tl.int64)
    row = (block % blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < rows
    column = tl.arange(0, BLOCK_WIDTH)
    cells = live[:, None] & (column < WIDTH)[None, :]
    target += (b * target_b + h * target_h) * UNIT
    source += (b * source_b + h * source_h) * UNIT
    target_at = target + (row * target_r * UNIT)[:, None] + column[None, :]
    source_at = source + (row * source_r * UNIT)[:, None] + column[None, :]
    part = tl.load(source_at, mask=cells, other=0.0).to(tl.float32)
    if CHECKED:
        # The comparison is false for NaN, too.
        bad = tl.max(tl.where(tl.abs(part) < float("inf"), 0, 1), axis=1)
        flag_at = overflow + b * unscale_b + (h // shared) * unscale_h
        tl.store(flag_at + 0 * row, bad, mask=bad > 0)
    factor = alpha
    if SCALED:
        factor *= tl.load(unscale + b * unscale_b + (h // shared) * unscale_h)
    held = tl.load(target_at, mask=cells, other=0.0)
    tl.store(target_at, held + part * factor, mask=cells)


_NUMBERS = (
    "heads", "rows", "blocks", "target_b", "target_h", "target_r", "source_b", "source_h",
    "source_r", "unscale_b", "unscale_h", "shared",
)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        *(f"{name}_{i}" for i in range(3) for name in _NUMBERS), "first_end", "second_end",
        "unscale", "overflow", "alpha",
    ]
)  # fmt: skip
def _add_kernel(
    target_0, source_0, heads_0, rows_0, blocks_0, target_b_0, target_h_0, target_r_0,
    source_b_0, source_h_0, source_r_0, unscale_b_0, unscale_h_0, shared_0,
    target_1, source_1, heads_1, rows_1, blocks_1, target_b_1, target_h_1, target_r_1,
    source_b_1, source_h_1, source_r_1, unscale_b_1, unscale_h_1, shared_1,
    target_2, source_2, heads_2, rows_2, blocks_2, target_b_2, target_h_2, target_r_2,
    source_b_2, source_h_2, source_r_2, unscale_b_2, unscale_h_2, shared_2,
    first_end, second_end, unscale, overflow, alpha, SCALED: tl.constexpr, CHECKED: tl.constexpr,
    UNIT_0: tl.constexpr, WIDTH_0: tl.constexpr, BLOCK_ROWS_0: tl.constexpr,
    BLOCK_WIDTH_0: tl.constexpr,
    UNIT_1: tl.constexpr, WIDTH_1: tl.constexpr, BLOCK_ROWS_1: tl.constexpr,
    BLOCK_WIDTH_1: tl.constexpr,
    UNIT_2: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK_ROWS_2: tl.constexpr,
    BLOCK_WIDTH_2: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < first_end:
        _add_block(
            program, target_0, source_0, heads_0, rows_0, blocks_0,
            target_b_0, target_h_0, target_r_0, source_b_0, source_h_0, source_r_0,
            unscale_b_0, unscale_h_0, shared_0, unscale, overflow, alpha, SCALED, CHECKED,
            UNIT_0, WIDTH_0, BLOCK_ROWS_0, BLOCK_WIDTH_0,
        )  # fmt: skip
    elif program < second_end:
        _add_block(
            program - first_end, target_1, source_1, heads_1, rows_1, blocks_1,
            target_b_1, target_h_1, target_r_1, source_b_1, source_h_1, source_r_1,
            unscale_b_1, unscale_h_1, shared_1, unscale, overflow, alpha, SCALED, CHECKED,
            UNIT_1, WIDTH_1, BLOCK_ROWS_1, BLOCK_WIDTH_1,
        )  # fmt: skip
    else:
        _add_block(
            program - second_end, target_2, source_2, heads_2, rows_2, blocks_2,
            target_b_2, target_h_2, target_r_2, source_b_2, source_h_2, source_r_2,
            unscale_b_2, unscale_h_2, shared_2, unscale, overflow, alpha, SCALED, CHECKED,
            UNIT_2, WIDTH_2, BLOCK_ROWS_2, BLOCK_WIDTH_2,
        )  # fmt: skip
