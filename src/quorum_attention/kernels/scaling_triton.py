# Triton's decorators and its own language are beyond a type checker.
# mypy: ignore-errors
"""Dividing ``grad_out`` by two Triton kernels, so that the host never waits for a factor."""

from functools import partial

import torch
import triton
import triton.language as tl

from quorum_attention.kernels import ahead

_BLOCK_ELEMENTS = 8192
_PROGRAMS = 1024


def divide_gradient_triton_(
    grad_out: torch.Tensor,
    value: torch.Tensor,
    unscale: torch.Tensor,
    excess: int,
    norms: torch.Tensor | None = None,
) -> None:
    """See ``scaling.divide_gradient_``; dense (b, h, n, d) tensors, allocates (2, b, hk) fp32.

    Args:
        excess: the shift of the probabilities minus ``LOG2_LARGEST``.
        norms: (2, b, hk) fp32 whose second half has the norms of ``value``; the first is changed.
    """
    batch, key_heads = unscale.shape
    if batch * key_heads == 0:
        return
    shared = grad_out.shape[1] // key_heads
    if ahead.RUNNING:
        ahead.wait("norm")
        ahead.wait("divide")
    if norms is None:
        norms = value_norms_triton(value)
    else:
        norms[0].zero_()
    with torch.cuda.device_of(grad_out):
        _launch(_norm_kernel, grad_out, shared, batch * key_heads, norms[0])
        _launch(
            _divide_kernel, grad_out, shared, batch * key_heads, norms, unscale,
            batch * key_heads, excess,
        )  # fmt: skip


def value_norms_triton(value: torch.Tensor) -> torch.Tensor:
    """(2, b, hk) fp32: 0, and the largest norm of a row of each head of ``value``, (b, hk, n, d)
    and dense."""
    batch, key_heads = value.shape[:2]
    norms = torch.zeros((2, batch, key_heads), dtype=torch.float32, device=value.device)
    if ahead.RUNNING:
        ahead.wait("norm")
    if norms.numel():
        with torch.cuda.device_of(value):
            _launch(_norm_kernel, value, 1, batch * key_heads, norms[1])
    return norms


def compile_norm(dtype: torch.dtype, width: int):
    """The kernel of norms for rows of ``dtype`` and ``width``, compiled."""
    rows, norms = torch.empty(1, 1, 128, width, dtype=dtype), torch.empty(1, 1)
    return _launch(_norm_kernel, rows, 1, 1, norms, compiled=True)


def compile_divide(dtype: torch.dtype, width: int):
    """The kernel that divides rows of ``dtype`` and ``width``, compiled."""
    rows, norms = torch.empty(1, 1, 128, width, dtype=dtype), torch.empty(2, 1, 1)
    return _launch(_divide_kernel, rows, 1, 1, norms, norms[0], 1, 0, compiled=True)


def _launch(kernel, tensor, heads, groups, *arguments, compiled=False):
    """Launch ``kernel`` over ``groups`` runs of rows; each run is ``heads`` adjacent heads.

    ``compiled``: only compile it, and return it.
    """
    width = tensor.shape[3]
    rows = heads * tensor.shape[2]
    if rows == 0:
        return None
    block_width = triton.next_power_of_2(max(1, width))
    block_rows = max(1, _BLOCK_ELEMENTS // block_width)
    programs = min(triton.cdiv(rows, block_rows), max(1, _PROGRAMS // groups))
    launch = partial(kernel.warmup, grid=(1,)) if compiled else kernel[(groups * programs,)]
    return launch(
        tensor, *arguments, rows, programs,
        WIDTH=width, BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width,
    )  # fmt: skip


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
