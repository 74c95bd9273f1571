"""Corrects rows with scores that are not finite, for which an operator returns finite numbers."""

from __future__ import annotations

import math

import torch

from quorum_attention.kernels.protocol import Call
from quorum_attention.kernels.tensors import row_blocks

# Bytes of scores that are looked at together.
_SCORE_BYTES = 256 * 1024

MEND_WORKSPACE_BYTES = 4 * _SCORE_BYTES
"""Upper bound of the bytes ``mend_odd_rows_`` allocates at any one time, besides ``MEND_ROW_BYTES``
for each row of a head."""

MEND_ROW_BYTES = 48


def mend_odd_rows_(
    out: torch.Tensor,
    lse: torch.Tensor,
    call: Call,
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
        call: the operator's arguments; query heads may share key heads.
    """
    query, key, bias = call.query, call.key, call.bias
    batch, heads, n_rows = lse.shape
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())].expand(batch, heads, n_rows, key.shape[2])
    for block in row_blocks(batch, heads, n_rows, lse.element_size()):
        ones = lse[block] / lse[block]
        if not math.isnan(float(ones.sum())):
            continue
        odd = ones.isnan() & (lse[block] != -torch.inf)
        for entry, head in odd.any(dim=-1).nonzero().tolist():
            at = (block[0].start + entry, block[1].start + head)
            keys = key[at[0], at[1] * key.shape[1] // heads]
            # Of so many rows and keys, neither they nor their scores exceed _SCORE_BYTES.
            items = _SCORE_BYTES // lse.element_size()
            step = max(1, min(int(items**0.5), items // max(1, keys.shape[1])))
            for rows in (odd[entry, head].nonzero().flatten() + block[2].start).split(step):
                some = query[at][rows].to(lse.dtype)
                mask = None if bias is None else bias[at]
                largest = _largest(some, keys, rows, step, call.is_causal, call.scale, mask)
                out[at][rows[largest.isnan() | (largest == torch.inf)]] = torch.nan
                out[at][rows[largest == -torch.inf]] = 0.0
                lse[at][rows] = torch.where(largest.isfinite(), lse[at][rows], largest)


def _largest(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: torch.Tensor,
    step: int,
    causal: bool,
    scale: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The largest score of each of ``rows``; NaN if a score is NaN, -inf without keys.

    Args:
        query: (rows, d), those of ``rows``.
        key, bias: (lk, d); (lq, lk) or None.
        step: most keys at a time.
    """
    found = query.new_full((rows.numel(),), -torch.inf)
    if bool(query.isnan().any(dim=-1).all()):
        return found.fill_(torch.nan)
    for first in range(0, key.shape[0], step):
        scores = (query @ key[first : first + step].to(query.dtype).mT).mul_(scale)
        if bias is not None:
            scores += bias[rows, first : first + step]
        if causal:
            columns = torch.arange(first, first + scores.shape[1], device=rows.device)
            scores.masked_fill_(columns > rows.unsqueeze(-1), -torch.inf)
        found = torch.maximum(found, scores.amax(dim=-1))
    return found
