"""Corrects rows with scores that are not finite, for which an operator returns finite numbers."""

from __future__ import annotations

import math

import torch

from quorum_attention.kernels.blocks import BLOCK_BYTES, row_blocks

# Bytes of scores that are looked at together.
_SCORE_BYTES = 256 * 1024

MEND_WORKSPACE_BYTES = 4 * _SCORE_BYTES
"""Upper bound of the bytes ``mend_odd_rows_`` allocates at any one time, besides ``MEND_ROW_BYTES``
for each row of a head."""

MEND_ROW_BYTES = 48


def mend_odd_rows_(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    scale: float,
    bias: torch.Tensor | None,
) -> None:
    """Correct, in place, the rows that have NaN, infinite or no scores.

    A row with a score of NaN or +inf has to be NaN; a row whose scores are all -inf has to be 0
    with lse -inf. torch's CPU operator differs: among few keys it ignores NaN when it looks for the
    maximum, it returns 0 with lse 0 if there is no maximum, and its 16-bit exponential turns NaN
    into 0. In all these rows lse is 0, NaN or infinite. That is checked first; nothing else of the
    other rows is read.

    Args:
        out: (b, h, lq, dv), as the operator returned it.
        lse: (b, h, lq), as the operator returned it; rows with -inf are right already.
        query, key, causal, scale: the operator's arguments; query heads may share key heads.
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
            keys = key[at[0], at[1] * key.shape[1] // query.shape[1]]
            _mend_(out[at], lse[at], rows, query[at], keys, causal, scale, _part(bias, at))


def _part(bias: torch.Tensor | None, at: tuple[int, int]) -> torch.Tensor | None:
    """The mask (lq or 1, lk or 1) of one head; ``bias`` may broadcast over batch and heads."""
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
    """The largest score of each of ``rows``; NaN if a score is NaN, -inf without keys.

    Args:
        query, key, bias: (lq, d), (lk, d), (lq or 1, lk or 1).
    """
    n_keys, width = key.shape
    if bias is not None:
        bias = bias.expand(query.shape[0], n_keys)
    found = torch.full((rows.numel(),), -torch.inf, dtype=dtype, device=rows.device)
    # Blocks of ``step`` queries and keys: neither they nor their scores exceed _SCORE_BYTES.
    items = _SCORE_BYTES // dtype.itemsize
    step = max(1, min(int(items**0.5), items // max(1, width)))
    for at in range(0, rows.numel(), step):
        some = rows[at : at + step]
        part = query[some].to(dtype)
        best = found[at : at + step]
        if bool(part.isnan().any(dim=-1).all()):
            # All scores of these rows are NaN.
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
