"""Merge softmax statistics of disjoint key sets, in place and in any order (paper, section 3).

With ``(out, lse)`` of two disjoint key sets, ``lse' = logaddexp(lse, lse_i)`` and
``out' = w out + w_i out_i`` where ``w = exp(lse - lse') = sigmoid(lse - lse_i)``, and ``w_i``
likewise. The exponential of an lse itself is never formed, so scores of any size are safe. The
weights are computed independently: ``1 - w_i`` would lose the digits of a small ``w``, and a large
value with a small weight would then distort the result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quorum_attention.kernels.launches import launch, to_add, to_merge, triton_available
from quorum_attention.kernels.tensors import BLOCK_BYTES, row_blocks

MERGE_WORKSPACE_BYTES = 3 * BLOCK_BYTES
"""Upper bound of the bytes ``merge_`` and ``add_`` allocate at any one time."""

_here = threading.local()


@contextmanager
def by_torch() -> Iterator[None]:
    """In this thread ``merge_`` and ``add_`` use torch's operators, also where Triton's kernels
    would be quicker: these may be compiling, which takes a second."""
    before = getattr(_here, "by_torch", False)
    _here.by_torch = True
    try:
        yield
    finally:
        _here.by_torch = before


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
        launch(to_merge(out, lse, out_i, lse_i))
        return
    if out.dtype.itemsize == 2:
        wide = out.float()
        merge_(wide, lse, out_i, lse_i)
        out.copy_(wide)
        return
    # On a GPU the host would have to wait. Where a kernel is tried out it may: operators that were
    # not used yet, each loaded in 10 to 60 ms, are not needed then.
    known = lse if not out.is_cuda else lse.cpu() if _left_to_torch() else None
    if known is not None and bool(torch.isneginf(known).all()):
        # All rows are empty: copying is half the traffic.
        out.copy_(out_i)
        lse.copy_(lse_i)
        return
    if lse.nbytes <= BLOCK_BYTES:
        _merge_block_(out, lse, out_i, lse_i)
        return
    # Row statistics are small: blocks of many rows keep every thread busy.
    batch, heads, rows = lse.shape
    for block in row_blocks(batch, heads, rows, lse.element_size()):
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
        launch(to_add((target,), (source,), alpha, unscale, overflow))
        return
    if unscale is None and overflow is None and source.dtype == target.dtype:
        target.add_(source, alpha=alpha)
        return
    batch, heads, rows, width = target.shape
    # In blocks, because a 16-bit source is first converted to the target's dtype.
    for block in row_blocks(batch, heads, rows, max(1, width) * target.element_size()):
        part = source[block].to(target.dtype)
        if overflow is not None and not _largest(part) < math.inf:
            _flag_(overflow, ~torch.isfinite(part), heads, block)
        if unscale is not None:
            part = part * _by_head(unscale, heads).expand(batch, heads, 1, 1)[block[:2]]
        target[block].add_(part, alpha=alpha)


def add_all_(
    targets: tuple[torch.Tensor, ...],
    sources: tuple[torch.Tensor, ...],
    alpha: float = 1.0,
    unscale: torch.Tensor | None = None,
    overflow: torch.Tensor | None = None,
) -> None:
    """``add_`` for up to three pairs, on a GPU in one launch."""
    pairs = list(zip(targets, sources, strict=True))
    one_dtype = len({source.dtype for source in sources}) == 1
    if one_dtype and all(t.is_cuda and _triton_can_merge(t, s) for t, s in pairs):
        launch(to_add(targets, sources, alpha, unscale, overflow))
        return
    for target, source in pairs:
        add_(target, source, alpha, unscale, overflow)


def _largest(part: torch.Tensor) -> float:
    """The largest magnitude; NaN if there is one. Read once, unlike what says where it is."""
    if not part.numel():
        return 0.0
    low, high = part.aminmax()
    return max(-float(low), float(high))


def _flag_(
    overflow: torch.Tensor, bad: torch.Tensor, heads: int, block: tuple[slice, slice, slice]
) -> None:
    """Set ``overflow`` to 1 for the heads in ``block`` that have a ``bad`` element."""
    shared = heads // overflow.shape[1]
    for entry, head in bad.flatten(2).any(-1).nonzero().tolist():
        at = 0 if overflow.shape[0] == 1 else block[0].start + entry
        overflow[at, (block[1].start + head) // shared] = 1


def _by_head(unscale: torch.Tensor, heads: int) -> torch.Tensor:
    """(b, h / g) factors as (b, h, 1, 1), a view wherever there is one."""
    batch, key_heads = unscale.shape
    shared = unscale[:, :, None].expand(batch, key_heads, heads // key_heads)
    return shared.reshape(batch, heads, 1, 1)


def _merge_block_(
    out: torch.Tensor, lse: torch.Tensor, out_i: torch.Tensor, lse_i: torch.Tensor
) -> None:
    kept, new = _update_lse_(lse, lse_i)
    _average_(out, out_i, kept.to(out.dtype).unsqueeze(-1), new.to(out.dtype).unsqueeze(-1))


def _update_lse_(lse: torch.Tensor, lse_i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge ``lse_i`` into ``lse`` in place; returns the weights of the old and the new keys."""
    lse_i = lse_i.to(lse.dtype)
    # The difference of two empty rows would be NaN. Adding an empty row changes nothing.
    apart = (lse_i - lse).masked_fill_(lse_i == -torch.inf, -torch.inf)
    new = apart.sigmoid()
    kept = apart.neg_().sigmoid_()
    torch.logaddexp(lse, lse_i, out=lse)
    return kept, new


def _average_(
    out: torch.Tensor, out_i: torch.Tensor, kept: torch.Tensor, new: torch.Tensor
) -> None:
    """``out = kept * out + new * out_i`` in place, with an ``out_i`` of any dtype."""
    out.mul_(kept)
    if out_i.dtype == out.dtype:
        out.addcmul_(out_i, new)
        return
    batch, heads, rows, width = out.shape
    for block in row_blocks(batch, heads, rows, max(1, width) * out.element_size()):
        out[block].addcmul_(out_i[block].to(out.dtype), new[block])


def _triton_can_merge(out: torch.Tensor, out_i: torch.Tensor, rounded: bool = False) -> bool:
    # The Triton kernel needs the last dimension contiguous; what torch returns has it so.
    return (
        triton_available()
        and not _left_to_torch()
        and (out.stride(-1) == 1 or out.shape[-1] <= 1)
        and (out_i.stride(-1) == 1 or out_i.shape[-1] <= 1)
        and (out.dtype == torch.float32 or (rounded and out.dtype.itemsize == 2))
    )


def _left_to_torch() -> bool:
    return getattr(_here, "by_torch", False)
