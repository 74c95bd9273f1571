"""Run tables for arbitrary group bits: any 64-bit word for every token (paper, section 4).

A pair (q, k) is kept where ``bits[q] & bits[k] == 0``. The verdict on a tile takes constant time:
it follows from the bitwise OR and AND of the words of its two blocks.

    clear   OR_q & OR_k == 0      no bit is on both sides: every pair is kept
    masked  AND_q & AND_k != 0    some bit is on both sides of every pair: none is kept
    mixed   otherwise             the kernel tests every pair

Masked tiles are in no run, so they are never loaded.
"""

from __future__ import annotations

from typing import Literal

import torch

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL
from quorum_attention.kernels.native.runs import FIELDS, NO_DIAGONAL, Runs

# Cells of the verdict matrix that are computed at a time.
_CELLS = 1 << 24


def summaries(bits: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bitwise (OR, AND) of the words of every block of ``block`` (a power of two) tokens.

    Args:
        bits: (n,) int64. The last block may have fewer tokens.
    """
    n = bits.numel()
    n_blocks = -(-n // block)
    folded = []
    for operator, neutral in ((torch.bitwise_or, 0), (torch.bitwise_and, -1)):
        words = torch.full((n_blocks * block,), neutral, dtype=torch.int64, device=bits.device)
        words[:n] = bits
        words = words.view(n_blocks, block)
        while words.shape[1] > 1:
            half = words.shape[1] // 2
            words = operator(words[:, :half], words[:, half:])
        folded.append(words[:, 0])
    return folded[0], folded[1]


def runs_of_bits(
    query_bits: torch.Tensor,
    key_bits: torch.Tensor,
    is_causal: bool,
    block: int,
    other: int,
    axis: Literal["query", "key"],
) -> Runs:
    """The runs of a monolithic call under group bits.

    Args:
        query_bits, key_bits: (n,), (m,) int64, on the device of the call.
        is_causal: keep only keys at or before the query.
        block: tokens of a block along ``axis``.
        other: tokens of a block along the other axis.
        axis: "query": runs of keys by blocks of queries; "key": runs of queries by blocks of keys.

    The host waits for the device once, because it has to know the number of runs.
    """
    along, across = (query_bits, key_bits) if axis == "query" else (key_bits, query_bits)
    n, m, device = along.numel(), across.numel(), along.device
    any_a, all_a = summaries(along, block)
    any_b, all_b = summaries(across, other)
    first_a = torch.arange(any_a.numel(), device=device) * block
    first_b = torch.arange(any_b.numel(), device=device) * other
    found = []
    step = max(1, _CELLS // max(1, any_b.numel()))
    for start in range(0, any_a.numel(), step):
        part = slice(start, start + step)
        verdict = torch.full((any_a[part].numel(), any_b.numel()), PARTIAL, dtype=torch.int8,
                             device=device)  # fmt: skip
        verdict.masked_fill_((any_a[part, None] & any_b[None]) == 0, FULL)
        verdict.masked_fill_((all_a[part, None] & all_b[None]) != 0, EMPTY)
        if is_causal:
            low, high = first_a[part, None], first_b[None]
            if axis == "query":
                verdict.masked_fill_(high > low + block - 1, EMPTY)
            else:
                verdict.masked_fill_(high + other - 1 < low, EMPTY)
        found.append(_runs_of_rows(verdict, start))
    rows = torch.cat(found)
    entries = torch.empty((rows.shape[0], len(FIELDS)), dtype=torch.int32, device=device)
    at, beside = (0, 2) if axis == "query" else (2, 0)
    entries[:, at] = rows[:, 0] * block
    entries[:, at + 1] = ((rows[:, 0] + 1) * block).clamp_max(n)
    entries[:, beside] = rows[:, 1] * other
    entries[:, beside + 1] = (rows[:, 2] * other).clamp_max(m)
    entries[:, 4] = 0 if is_causal else NO_DIAGONAL
    entries[:, 5] = 0
    entries[:, 6] = rows[:, 3] == PARTIAL
    blocks = torch.arange(any_a.numel() + 1, device=device)
    starts = torch.searchsorted(rows[:, 0].contiguous(), blocks).int()
    return Runs(starts, entries, any_a.numel())


def _runs_of_rows(verdict: torch.Tensor, first: int) -> torch.Tensor:
    """(row, start, stop, verdict) of maximal runs of clear or of mixed tiles, row by row."""
    n_rows, n_columns = verdict.shape
    changed = torch.ones((n_rows, n_columns + 1), dtype=torch.bool, device=verdict.device)
    changed[:, 1:-1] = verdict[:, 1:] != verdict[:, :-1]
    edges = changed.nonzero()
    row, column = edges[:, 0], edges[:, 1]
    # Every edge but the last of a row begins a run, which ends at the next edge.
    begins = column < n_columns
    stops = torch.roll(column, -1)
    kind = verdict[row[begins], column[begins]].long()
    runs = torch.stack([row[begins] + first, column[begins], stops[begins], kind], dim=1)
    return runs[kind != EMPTY]
