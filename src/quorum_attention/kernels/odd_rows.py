"""Rows whose scores are not all finite, where an operator makes finite numbers of them."""

from __future__ import annotations

import math

import torch

from quorum_attention.kernels.blocks import BLOCK_BYTES, row_blocks


def mend_odd_rows_(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    scale: float,
    bias: torch.Tensor | None,
) -> None:
    """Give rows with NaN, infinite or no scores what they have in exact arithmetic, in place.

    A row with a score of NaN or +inf has an output of NaN, and one with scores of -inf alone
    weighs nothing: 0, with an lse of -inf. torch's operator for the CPU ignores a NaN when it looks
    for a maximum among few keys, returns 0 with an lse of 0 where that leaves it none, and takes
    16-bit exponentials by a polynomial that makes 0 of NaN. All rows that this touches have an lse
    that is 0, NaN or infinite, which is asked first: of other rows nothing else is read.

    Args:
        out: (b, h, lq, dv), as the operator returned it.
        lse: (b, h, lq), likewise; rows of -inf are right as they are.
        query, key, causal, scale: of the call.
        bias: (b or 1, h or 1, lq or 1, lk or 1), or None.
    """
    batch, heads, n_rows = lse.shape
    if lse.nbytes <= BLOCK_BYTES and not math.isnan(float((lse / lse).sum())):
        return
    for block in row_blocks(batch, heads, n_rows, lse.element_size()):
        part = lse[block]
        ones = part / part
        if not math.isnan(float(ones.sum())):
            continue
        odd = ones.isnan() & (part != -torch.inf)
        for entry, head in odd.any(dim=-1).nonzero().tolist():
            at = (block[0].start + entry, block[1].start + head)
            rows = odd[entry, head].nonzero().flatten() + block[2].start
            _mend_(out[at], lse[at], rows, query[at], key[at], causal, scale, _part(bias, at))


def _part(bias: torch.Tensor | None, at: tuple[int, int]) -> torch.Tensor | None:
    """(lq or 1, lk or 1) of a mask that may broadcast over batch entries and heads."""
    if bias is None:
        return None
    return bias[at[0] if bias.shape[0] > 1 else 0, at[1] if bias.shape[1] > 1 else 0]


def _mend_(
    out: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    scale: float,
    bias: torch.Tensor | None,
) -> None:
    """``mend_odd_rows_`` for some ``rows`` of one head."""
    largest = _largest(query, key, rows, causal, scale, bias, lse.dtype)
    lost = rows[largest.isnan() | (largest == torch.inf)]
    out.index_fill_(0, lost, torch.nan)
    out.index_fill_(0, rows[largest == -torch.inf], 0.0)
    lse[rows] = torch.where(largest.isfinite(), lse[rows], largest)


def _largest(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: torch.Tensor,
    causal: bool,
    scale: float,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The largest score of every one of ``rows``, NaN where there is one; -inf for no key.

    Args:
        query, key, bias: (lq, d), (lk, d), (lq or 1, lk or 1).
    """
    n_keys, width = key.shape
    if bias is not None:
        bias = bias.expand(query.shape[0], n_keys)
    found = torch.full((rows.numel(),), -torch.inf, dtype=dtype, device=rows.device)
    # As many queries as keys at a time: neither of the two nor their scores take more than a block.
    items = BLOCK_BYTES // dtype.itemsize
    step = max(1, min(int(items**0.5), items // max(1, width)))
    for at in range(0, rows.numel(), step):
        some = rows[at : at + step]
        part = query[some].to(dtype)
        best = found[at : at + step]
        if bool(part.isnan().any(dim=-1).all()):
            # Whatever the keys are.
            best.fill_(torch.nan)
            continue
        for first in range(0, n_keys, step):
            scores = (part @ key[first : first + step].to(dtype).mT).mul_(scale)
            if bias is not None:
                scores += bias[some, first : first + step]
            if causal:
                columns = torch.arange(first, first + scores.shape[1], device=rows.device)
                scores.masked_fill_(columns > some.unsqueeze(-1), -torch.inf)
            torch.maximum(best, scores.amax(dim=-1), out=best)
    return found
