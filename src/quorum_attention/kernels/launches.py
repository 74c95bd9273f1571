"""The four Triton kernels beside attention: what each is launched with, and its launch.

Triton compiles a kernel again for every combination of integer arguments that are 1, multiples of
16, or neither; each compilation takes 0.7 s. These kernels gain little from that, so their integers
are not specialised. Strides are passed as multiples of a common unit that is a compile-time
constant: that is enough for rows to be read and written in words of 16 bytes.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch

from quorum_attention.kernels.torch_private import outside

# Elements of a program's block: enough for full memory bandwidth, few enough for the registers.
_BLOCK_ELEMENTS = 4096
# The same for kernels that only read, or change in place.
_READ_ELEMENTS = 8192
_READ_PROGRAMS = 1024
# The largest unit of strides, in elements: a power of two.
_LARGEST_UNIT = 16
# Rows of the tensors that kernels are compiled for ahead.
_ROWS = 128


# Held while the thread compiles a kernel, and by launches meanwhile: none is compiled twice.
_compiling = threading.Lock()
_warming: list[threading.Thread] = []


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        kernel: "merge", "add", "norm" or "divide".
        programs: how many; 0: there is nothing to do.
        arguments: tensors and numbers in the order of the kernel's parameters.
        constants: what is compiled in; the parameters after the arguments.
    """

    kernel: str
    programs: int
    arguments: list[Any]
    constants: tuple[object, ...]


def launch(what: Launch) -> None:
    """Launch it on the current stream of its tensors' device."""
    if not what.programs:
        return
    # What is launched may be what the thread is compiling.
    waits = any(thread.is_alive() for thread in _warming)
    with torch.cuda.device_of(what.arguments[0]), _compiling if waits else nullcontext():
        _kernel(what.kernel)[(what.programs,)](*what.arguments, *what.constants)


def compile_ahead(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, scaled: bool | None
) -> None:
    """Begin to compile what merges and adds on ``device`` in a thread, beside what the caller does.

    What fails is left to the launch, which fails in the same way.

    Args:
        dtype: of the inputs.
        head_dim, value_dim: of query and key, and of value.
        scaled: whether the backward that is to follow is scaled; None: there is none.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or not triton_available():
        return
    with outside():
        # In the order in which they are needed.
        kernels = [merging(dtype, value_dim)]
        if scaled is not None:
            kernels.append(adding(dtype, (head_dim, head_dim, value_dim), scaled))
        if scaled:
            kernels += finding_norms(dtype, value_dim), dividing(dtype, value_dim)

    def work() -> None:
        with suppress(Exception), torch.cuda.device(device):
            for what in kernels:
                compile_for(what)

    thread = threading.Thread(target=work, name="compiles Triton kernels")
    with suppress(RuntimeError):  # no more threads: launches compile
        thread.start()
        _warming[:] = [*(t for t in _warming if t.is_alive()), thread]


def compile_for(what: Launch) -> None:
    """Have Triton compile it and load it onto the current device; nothing is launched."""
    with _compiling:
        compiled = _kernel(what.kernel).warmup(*what.arguments, *what.constants, grid=(1,))
        _ = compiled.run  # here Triton loads it, and makes what launches it


@functools.cache
def triton_available() -> bool:
    """Whether Triton, which is optional, is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernel(name: str) -> Any:
    # To import Triton takes 0.4 s.
    from quorum_attention.kernels import merge_triton

    return getattr(merge_triton, f"_{name}_kernel")


def to_merge(
    out: torch.Tensor, lse: torch.Tensor, out_i: torch.Tensor, lse_i: torch.Tensor
) -> Launch:
    """Merge (out_i, lse_i) into (out, lse); see ``merge.merge_``."""
    batch, heads, rows, width = out.shape
    block_rows, block_width = _block(width)
    blocks = -(-rows // block_rows)
    unit, strides = _strides(out, out_i)
    arguments = [
        out, lse, out_i, lse_i, heads, rows, blocks, *strides, *lse.stride(), *lse_i.stride(),
    ]  # fmt: skip
    constants = (unit, width, block_rows, block_width)
    return Launch("merge", batch * heads * blocks, arguments, constants)


def to_add(
    targets: tuple[torch.Tensor, ...],
    sources: tuple[torch.Tensor, ...],
    alpha: float,
    unscale: torch.Tensor | None,
    overflow: torch.Tensor | None,
) -> Launch:
    """Add up to three pairs; see ``merge.add_all_``."""
    by_head = unscale if overflow is None else overflow
    factors_b = factors_h = factors_heads = 0
    if by_head is not None:
        assert unscale is None or unscale.stride() == by_head.stride()
        several, factors_heads = by_head.shape
        factors_b, factors_h = by_head.stride()
        factors_b = factors_b if several > 1 else 0
    arguments: list[Any] = []
    blocks: list[int] = []
    constants: list[object] = [unscale is not None, overflow is not None]
    for i in range(3):
        # A missing pair gets no blocks, so its pointers are never read.
        here = i < len(targets)
        target, source = (targets[i], sources[i]) if here else (targets[0], sources[0])
        batch, heads, rows, width = target.shape
        block_rows, block_width = _block(width)
        each = -(-rows // block_rows)
        unit, strides = _strides(target, source)
        constants += (unit, width, block_rows, block_width)
        blocks.append(batch * heads * each if here else 0)
        shared = max(1, heads // factors_heads) if factors_heads else 1
        arguments += (
            target, source, max(1, heads), rows, max(1, each), *strides, factors_b, factors_h,
            shared,
        )  # fmt: skip
    factors = targets[0] if unscale is None else unscale
    flags = targets[0] if overflow is None else overflow
    arguments += (blocks[0], blocks[0] + blocks[1], factors, flags, float(alpha))
    return Launch("add", sum(blocks), arguments, tuple(constants))


def to_norm(tensor: torch.Tensor, heads: int, groups: int, norms: torch.Tensor) -> Launch:
    """Find the largest norm of a row of each of ``groups`` runs of rows of ``heads`` heads."""
    return _over_runs("norm", tensor, heads, groups, norms)


def to_divide(
    tensor: torch.Tensor,
    heads: int,
    groups: int,
    norms: torch.Tensor,
    unscale: torch.Tensor,
    excess: int,
) -> Launch:
    """Divide runs of rows by powers of two that follow from ``norms``; see ``scaling.py``."""
    return _over_runs("divide", tensor, heads, groups, norms, unscale, groups, excess)


def _over_runs(
    kernel: str, tensor: torch.Tensor, heads: int, groups: int, *arguments: Any
) -> Launch:
    width = tensor.shape[3]
    rows = heads * tensor.shape[2]
    block_width = _block(width)[1]
    block_rows = max(1, _READ_ELEMENTS // block_width)
    programs = min(-(-rows // block_rows), max(1, _READ_PROGRAMS // max(1, groups)))
    everything = [tensor, *arguments, rows, programs]
    return Launch(kernel, groups * programs, everything, (width, block_rows, block_width))


# These run several times for each rectangle, where the host may be the limit.
@functools.cache
def _block(width: int) -> tuple[int, int]:
    """Rows and columns of a block."""
    block_width = 1 << max(0, width - 1).bit_length()
    return max(1, _BLOCK_ELEMENTS // block_width), block_width


def _strides(one: torch.Tensor, other: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """The first three strides of two tensors (b, h, rows, d) of one shape: the largest unit that
    they are multiples of, and the multiples; 0 in dimensions of size 1."""
    batch, heads, rows, _ = one.shape
    b, h, r, _ = one.stride()
    b_i, h_i, r_i, _ = other.stride()
    if batch <= 1:
        b = b_i = 0
    if heads <= 1:
        h = h_i = 0
    if rows <= 1:
        r = r_i = 0
    # Their lowest bit that is set.
    bits = b | h | r | b_i | h_i | r_i | _LARGEST_UNIT
    unit = bits & -bits
    return unit, (
        b // unit, h // unit, r // unit, b_i // unit, h_i // unit, r_i // unit,
    )  # fmt: skip


# --- As calls of a kind will launch them ------------------------------------------------------


def merging(dtype: torch.dtype, width: int) -> Launch:
    """Parts of ``dtype`` and ``width`` are merged."""
    out, lse = _empty(1, 1, _ROWS, width), _empty(1, 1, _ROWS)
    return to_merge(out, lse, out.to(dtype), lse)


def adding(dtype: torch.dtype, widths: tuple[int, ...], scaled: bool) -> Launch:
    """Gradients of ``dtype`` and ``widths`` are added, and at last rounded to it; ``scaled``: with
    factors and flags."""
    targets = tuple(_empty(1, 1, _ROWS, width) for width in widths)
    sources = tuple(target.to(dtype) for target in targets)
    unscale = _empty(1, 1) if scaled else None
    overflow = _empty(1, 1, dtype=torch.int32) if scaled else None
    return to_add(targets, sources, 1.0, unscale, overflow)


def finding_norms(dtype: torch.dtype, width: int) -> Launch:
    """The norms of rows of ``dtype`` and ``width`` are found."""
    return to_norm(_empty(1, 1, _ROWS, width, dtype=dtype), 1, 1, _empty(1, 1))


def dividing(dtype: torch.dtype, width: int) -> Launch:
    """Rows of ``dtype`` and ``width`` are divided."""
    norms = _empty(2, 1, 1)
    return to_divide(_empty(1, 1, _ROWS, width, dtype=dtype), 1, 1, norms, norms[0], 0)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")
