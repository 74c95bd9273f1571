"""Launches of the Triton kernels that merge, mend and add (``merge_triton.py``), and
that scale (``scaling_triton.py``).

Triton compiles a kernel again for every combination of integer arguments that are 1,
multiples of 16, or neither; each compilation takes 0.7 s. These kernels gain little
from that, so their integers are not specialised. Strides are passed as multiples of a
common unit that is a compile-time constant: that is enough for rows to be read and
written in words of 16 bytes.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from contextlib import suppress
from typing import Any

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.threads import try_start

# Elements of a program's block: enough for full memory bandwidth, few enough for the
# registers.
_BLOCK_ELEMENTS = 4096
# The largest unit of strides, in elements: a power of two.
_LARGEST_UNIT = 16


@functools.cache
def triton_available() -> bool:
    """Whether Triton, which is optional, is installed."""
    return importlib.util.find_spec("triton") is not None


# The thread that imports Triton, if there is one.
_warming: list[threading.Thread] = []


@functools.cache
def warm_up() -> None:
    """Import Triton and hash its files, as its cache does, while the host tests and
    plans a first call."""
    if not triton_available():
        return
    thread = threading.Thread(target=_import_triton, name="imports Triton")
    if try_start(thread):
        _warming.append(thread)


def _import_triton() -> None:
    with suppress(Exception):  # a launch that needs it says why
        # To import Triton takes 0.4 s, to hash its files 0.5 s.
        from triton.runtime.cache import triton_key  # elsewhere in other versions

        from quorum_attention.kernels import merge_triton  # noqa: F401

        triton_key()


@functools.cache
def _kernel(name: str) -> Any:
    for thread in _warming:
        # Triton would hash its files once more beside the thread.
        thread.join()
    from quorum_attention.kernels import merge_triton, scaling_triton

    scales = name in ("norms", "divide")
    module = scaling_triton if scales else merge_triton
    return getattr(module, f"_{name}_kernel")


def triton_takes(*tensors: torch.Tensor) -> bool:
    """Whether these kernels take such tensors: none of 64 bits, the last dimension
    contiguous (what torch returns has it so)."""
    return triton_available() and all(
        tensor.is_cuda
        and tensor.dtype.itemsize <= 4
        and (tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
        for tensor in tensors
    )


def launch_merge(
    out: torch.Tensor, lse: torch.Tensor, out_i: torch.Tensor, lse_i: torch.Tensor
) -> None:
    """Merge (out_i, lse_i) into (out, lse); see ``merge.merge_``."""
    unit, strides = _strides_in_units(out, out_i)
    _launch(
        "merge",
        (out, lse, out_i, lse_i),
        (*strides, *lse.stride(), *lse_i.stride(), unit),
    )


def launch_mend(out: torch.Tensor, lse: torch.Tensor) -> None:
    """Make ``lse`` NaN in rows of NaN; see ``merge.mend_``."""
    strides = (*lse.stride(), *out.stride()[:3])
    _launch("mend", (lse.unsqueeze(-1), out), strides)


def launch_add(
    target: torch.Tensor,
    source: torch.Tensor,
    alpha: float,
    unscale: torch.Tensor | None,
    overflow: torch.Tensor | None,
) -> None:
    """Add ``source`` to ``target``; see ``merge.add_``."""
    factor_strides, group = _factors_by_head(target, unscale, overflow)
    unit, strides = _strides_in_units(target, source)
    # Where there are no factors or no flags, the kernel reads none: any pointer will
    # do.
    unscale_pointer = target if unscale is None else unscale
    overflow_pointer = target if overflow is None else overflow
    is_scaled = unscale is not None
    is_checked = overflow is not None
    _launch(
        "add",
        (target, source, unscale_pointer, overflow_pointer, float(alpha)),
        (*strides, *factor_strides, group, is_scaled, is_checked, unit),
    )


def launch_norms(tensor: torch.Tensor, norms: torch.Tensor) -> None:
    """Raise ``norms`` (b, hk), which are 0, to those of ``tensor`` (b, h, n, d); see
    ``scaling.largest_norms``."""
    norm_strides, group = _factors_by_head(tensor, norms, None)
    unit, strides = _strides_in_units(tensor, tensor)
    _launch("norms", (tensor, norms), (*strides[:3], *norm_strides, group, unit))


def launch_divide(
    grad_out: torch.Tensor,
    grad_norm: torch.Tensor,
    value_norm: torch.Tensor,
    unscale: torch.Tensor,
    log2_scale: int,
    largest_exponent: int,
) -> None:
    """Divide ``grad_out``; see ``scaling.divide_gradient_``."""
    assert grad_norm.stride() == value_norm.stride()
    norm_strides, group = _factors_by_head(grad_out, grad_norm, None)
    unscale_strides, _ = _factors_by_head(grad_out, unscale, None)
    unit, strides = _strides_in_units(grad_out, grad_out)
    _launch(
        "divide",
        (grad_out, grad_norm, value_norm, unscale, log2_scale),
        (
            *strides[:3],
            *norm_strides,
            *unscale_strides,
            group,
            largest_exponent,
            unit,
        ),
    )


def _factors_by_head(
    target: torch.Tensor, unscale: torch.Tensor | None, overflow: torch.Tensor | None
) -> tuple[tuple[int, int], int]:
    """Return the strides of factors or flags along batch and heads, and how many heads
    of ``target`` share one."""
    by_head = unscale if overflow is None else overflow
    if by_head is None:
        return (0, 0), 1
    assert unscale is None or unscale.stride() == by_head.stride()
    entries, key_heads = by_head.shape
    entry_stride, head_stride = by_head.stride()
    if entries == 1:
        entry_stride = 0
    return (entry_stride, head_stride), max(1, target.shape[1] // max(1, key_heads))


def _launch(name: str, pointers: tuple[Any, ...], scalars: tuple[Any, ...]) -> None:
    """Launch a kernel over the rows of its first tensor (b, h, rows, d), on the current
    stream of its device.

    Args:
        pointers: arguments before the numbers of heads, rows and blocks of rows.
        scalars: arguments after them.
    """
    tensor = pointers[0]
    batch, heads, rows, width = tensor.shape
    block_rows, block_width = _block(width)
    blocks = ceil_div(rows, block_rows)
    n_programs = batch * heads * blocks
    if n_programs == 0:
        return
    with torch.cuda.device_of(tensor):
        _kernel(name)[(n_programs,)](
            *pointers, heads, rows, blocks, *scalars, width, block_rows, block_width
        )


# This runs several times for each rectangle, where the host may be the limit.
@functools.cache
def _block(width: int) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    block_width = 1 << max(0, width - 1).bit_length()
    return max(1, _BLOCK_ELEMENTS // block_width), block_width


def _strides_in_units(
    tensor: torch.Tensor, other_tensor: torch.Tensor
) -> tuple[int, tuple[int, ...]]:
    """Return the first three strides of two tensors (b, h, rows, d) of one shape, in
    units.

    Returns:
        The largest unit of which the strides are multiples, and the multiples; they are
        0 in dimensions of size 1.
    """
    batch, heads, rows, _ = tensor.shape
    b, h, r, _ = tensor.stride()
    b_i, h_i, r_i, _ = other_tensor.stride()
    if batch <= 1:
        b = b_i = 0
    if heads <= 1:
        h = h_i = 0
    if rows <= 1:
        r = r_i = 0
    bits = b | h | r | b_i | h_i | r_i | _LARGEST_UNIT
    unit = bits & -bits  # the lowest bit that is set
    multiples = (
        b // unit,
        h // unit,
        r // unit,
        b_i // unit,
        h_i // unit,
        r_i // unit,
    )
    return unit, multiples
