"""Merge softmax statistics of disjoint key sets, in place and in any order (paper, section 3).

With ``(out, lse)`` of two disjoint key sets, ``lse' = logaddexp(lse, lse_i)`` and
``out' = w out + w_i out_i`` where ``w = exp(lse - lse') = sigmoid(lse - lse_i)``, and ``w_i``
likewise. The exponential of an lse itself is never formed, so scores of any size are safe. The
weights are computed independently: ``1 - w_i`` would lose the digits of a small ``w``, and a large
value with a small weight would then distort the result.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
from contextlib import suppress
from typing import Any

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.kernels.tensors import BLOCK_BYTES, row_blocks
from quorum_attention.threads import try_start

MERGE_WORKSPACE_BYTES = 3 * BLOCK_BYTES
"""Upper bound of the bytes ``merge_`` and ``add_`` allocate at any one time."""


def empty_(out: torch.Tensor, lse: torch.Tensor) -> None:
    """Make statistics those of an empty key set: ``out`` 0 and ``lse`` -inf, in place."""
    out.zero_()
    lse.fill_(-torch.inf)


def merge_(out: torch.Tensor, lse: torch.Tensor, out_i: torch.Tensor, lse_i: torch.Tensor) -> None:
    """Merge the statistics of more keys into running ones, in place.

    Args:
        out: running output (b, h, rows, dv), fp32 or fp64; any strides. One of 16 bits is merged in
            fp32 and rounded once each time, so it is for two sets of keys.
        lse: running natural-log log-sum-exp (b, h, rows), fp32 or fp64.
        out_i: normalised output over the new keys, same shape, any floating dtype.
        lse_i: its log-sum-exp, same shape as ``lse``; -inf (with ``out_i`` 0) in rows without
            keys.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    if out.shape != out_i.shape or lse.shape != lse_i.shape or out.shape[:3] != lse.shape:
        raise ValueError(
            f"statistics of shapes {tuple(out_i.shape)}, {tuple(lse_i.shape)} cannot be merged "
            f"into {tuple(out.shape)}, {tuple(lse.shape)}"
        )
    if out.is_cuda and _triton_can_merge(out, out_i, rounded=True):
        launch_merge(out, lse, out_i, lse_i)
        return
    if out.dtype.itemsize == 2:
        wide = out.float()
        merge_(wide, lse, out_i, lse_i)
        out.copy_(wide)
        return
    # On a GPU the host would have to wait.
    if not out.is_cuda and bool(torch.isneginf(lse).all()):
        # All rows are empty: copying is half the traffic.
        out.copy_(out_i)
        lse.copy_(lse_i)
        return
    batch, heads, rows, width = out.shape
    for block in row_blocks(batch, heads, rows, max(1, width) * out.element_size()):
        _merge_block_(out[block], lse[block], out_i[block], lse_i[block])


def add_(
    target: torch.Tensor,
    source: torch.Tensor,
    alpha: float = 1.0,
    unscale: torch.Tensor | None = None,
    overflow: torch.Tensor | None = None,
) -> None:
    """``target += alpha * unscale * source`` for (b, h, rows, d) tensors, in place.

    Args:
        target: fp32 or fp64; any strides.
        source: same shape, any floating dtype.
        unscale: (b or 1, h / g) fp32: one factor for g neighbouring heads; None is 1.
        overflow: shaped like ``unscale``, int32; 1 is set where any element of ``source`` is not
            finite; None: not checked.
    """
    if target.is_cuda and _triton_can_merge(target, source):
        launch_add(target, source, alpha, unscale, overflow)
        return
    if unscale is None and overflow is None and source.dtype == target.dtype:
        target.add_(source, alpha=alpha)
        return
    batch, heads, rows, width = target.shape
    # In blocks, because a 16-bit source is first converted to the target's dtype.
    for block in row_blocks(batch, heads, rows, max(1, width) * target.element_size()):
        part = source[block].to(target.dtype)
        if overflow is not None:
            # NaN is not below infinity either.
            bad = (part.abs().flatten(2).amax(-1) < math.inf).logical_not_()
            for entry, head in bad.nonzero().tolist():
                at = 0 if overflow.shape[0] == 1 else block[0].start + entry
                overflow[at, (block[1].start + head) // (heads // overflow.shape[1])] = 1
        if unscale is not None:
            part = part * by_head(unscale, heads).expand(batch, heads, 1, 1)[block[:2]]
        target[block].add_(part, alpha=alpha)


def by_head(unscale: torch.Tensor, heads: int) -> torch.Tensor:
    """(b, h / g) factors as (b, h, 1, 1), a view wherever there is one."""
    batch, key_heads = unscale.shape
    shared = unscale[:, :, None].expand(batch, key_heads, heads // key_heads)
    return shared.reshape(batch, heads, 1, 1)


def _merge_block_(
    out: torch.Tensor, lse: torch.Tensor, out_i: torch.Tensor, lse_i: torch.Tensor
) -> None:
    lse_i = lse_i.to(lse.dtype)
    # The difference of two empty rows would be NaN. Adding an empty row changes nothing.
    apart = (lse_i - lse).masked_fill_(lse_i == -torch.inf, -torch.inf)
    new = apart.sigmoid()
    kept = apart.neg_().sigmoid_()
    torch.logaddexp(lse, lse_i, out=lse)
    out.mul_(kept.to(out.dtype).unsqueeze(-1))
    out.addcmul_(out_i.to(out.dtype), new.to(out.dtype).unsqueeze(-1))


def _triton_can_merge(out: torch.Tensor, out_i: torch.Tensor, rounded: bool = False) -> bool:
    # The Triton kernel needs the last dimension contiguous; what torch returns has it so.
    return (
        triton_available()
        and (out.stride(-1) == 1 or out.shape[-1] <= 1)
        and (out_i.stride(-1) == 1 or out_i.shape[-1] <= 1)
        and (out.dtype == torch.float32 or (rounded and out.dtype.itemsize == 2))
    )


# Attention sinks: a logit for each head that takes part in the softmax and has no value.
#
# A sink is one more key of every row, with the value 0. So it needs no kernel: a row's state begins
# with the sink instead of with no key, or a finished row takes it in:
#
#     lse' = logaddexp(lse, sink),   out' = out exp(lse - lse').
#
# A backward that is given lse' and out' computes the true probabilities, so any kernel's will do.
# The gradient of the sink is that of a key with probability exp(sink - lse') and value 0: minus the
# sum over rows of exp(sink - lse') delta.


def join_sinks_(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Takes the sinks into statistics, in place.

    Args:
        out: (b, h, rows, dv), any floating dtype.
        lse: (b, h, rows), fp32 or fp64.
        sinks: (h,), of the dtype of lse, on its device.
    """
    # The odds of the keys against the sink; a row without either keeps nothing.
    apart = (lse - sinks[:, None]).masked_fill_(lse == -torch.inf, -torch.inf)
    out.mul_(apart.sigmoid_().unsqueeze(-1))
    torch.logaddexp(lse, sinks[:, None], out=lse)


def sinks_gradient(
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    grad_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of the sinks, (h,), in their dtype and on their device.

    Args:
        grad_out, out: (*batch, h, rows, dv), on any device.
        lse: (*batch, h, rows), with the sinks in it.
        sinks: (h,).
        grad_lse: the upstream gradient of ``lse``, of its shape; None is 0.
    """
    heads, rows, width = out.shape[-3:]
    own = sinks.detach().to(device=out.device, dtype=lse.dtype)
    state = torch.promote_types(lse.dtype, torch.float64)
    sums = torch.zeros(heads, dtype=state, device=out.device)
    batch = math.prod(out.shape[:-3])  # -1 means nothing where there are no rows
    grads, outs = (t.reshape(batch, heads, rows, width) for t in (grad_out, out))
    lses = lse.reshape(batch, heads, rows)
    for block in row_blocks(lses.shape[0], heads, rows, 3 * max(1, width) * lse.element_size()):
        upstream = grads[block].to(device=out.device, dtype=lse.dtype)
        delta = (upstream * outs[block].to(lse.dtype)).sum(dim=-1)
        if grad_lse is not None:
            given = grad_lse.reshape(lses.shape)[block]
            delta -= given.to(device=out.device, dtype=lse.dtype)
        logit = own[block[1]][:, None]
        share = (logit - lses[block].to(out.device)).masked_fill_(logit == -torch.inf, -torch.inf)
        sums[block[1]] -= (share.exp_() * delta).sum(dim=(0, 2), dtype=sums.dtype)
    return sums.to(device=sinks.device, dtype=sinks.dtype)


# --- Triton's kernels: merging, adding, finding norms --------------------------------------------
#
# Triton compiles a kernel again for every combination of integer arguments that are 1, multiples of
# 16, or neither; each compilation takes 0.7 s. These kernels gain little from that, so their
# integers are not specialised. Strides are passed as multiples of a common unit that is a
# compile-time constant: that is enough for rows to be read and written in words of 16 bytes.

# Elements of a program's block: enough for full memory bandwidth, few enough for the registers.
_BLOCK_ELEMENTS = 4096
# The largest unit of strides, in elements: a power of two.
_LARGEST_UNIT = 16


@functools.cache
def triton_available() -> bool:
    """Whether Triton, which is optional, is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernel(name: str) -> Any:
    # To import Triton takes 0.4 s.
    from quorum_attention.kernels import merge_triton

    return getattr(merge_triton, f"_{name}_kernel")


@functools.cache
def warm_up() -> None:
    """Import Triton and hash its files, as its cache does, while the host tests and plans a first
    call."""
    if triton_available():
        try_start(threading.Thread(target=_imported, name="imports Triton"))


def _imported() -> None:
    with suppress(Exception):  # a launch that needs it says why
        _kernel("merge")
        from triton.runtime.cache import triton_key  # elsewhere in other versions

        triton_key()


def _launch(kernel: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    """Launch a kernel over the rows of its first tensor (b, h, rows, d), on its device's current
    stream; with these arguments before and after heads, rows, and blocks of rows."""
    batch, heads, rows, width = before[0].shape
    block_rows, block_width = _block(width)
    blocks = ceil_div(rows, block_rows)
    if programs := batch * heads * blocks:
        with torch.cuda.device_of(before[0]):
            sizes = (width, block_rows, block_width)
            _kernel(kernel)[(programs,)](*before, heads, rows, blocks, *after, *sizes)


def launch_merge(
    out: torch.Tensor, lse: torch.Tensor, out_i: torch.Tensor, lse_i: torch.Tensor
) -> None:
    """Merge (out_i, lse_i) into (out, lse); see ``merge_``."""
    unit, strides = _strides(out, out_i)
    after = (*strides, *lse.stride(), *lse_i.stride(), unit)
    _launch("merge", (out, lse, out_i, lse_i), after)


def launch_add(
    target: torch.Tensor,
    source: torch.Tensor,
    alpha: float,
    unscale: torch.Tensor | None,
    overflow: torch.Tensor | None,
) -> None:
    """Add ``source`` to ``target``; see ``add_``."""
    by_head = unscale if overflow is None else overflow
    factors_b = factors_h = 0
    shared = 1
    if by_head is not None:
        assert unscale is None or unscale.stride() == by_head.stride()
        factors_b, factors_h = by_head.stride()
        factors_b = factors_b if by_head.shape[0] > 1 else 0
        shared = max(1, target.shape[1] // max(1, by_head.shape[1]))
    spares = (target if tensor is None else tensor for tensor in (unscale, overflow))
    unit, strides = _strides(target, source)
    switches = (unscale is not None, overflow is not None)
    after = (*strides, factors_b, factors_h, shared, *switches, unit)
    _launch("add", (target, source, *spares, float(alpha)), after)


def launch_norms(tensor: torch.Tensor, norms: torch.Tensor, key_heads: int) -> None:
    """Raise ``norms`` (b * key_heads,) fp32 to the largest squared norm of a finite row of
    ``tensor`` (b, h, n, d), last dimension contiguous, for each key head."""
    _launch("norm", (tensor, norms), (tensor.shape[1] // key_heads, tensor.stride()[:3]))


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
