"""How much of a call a mask leaves, for predictions of its time."""

from __future__ import annotations

from quorum_attention.decomposition.pairs import Pairs, Ranges
from quorum_attention.decomposition.verdicts import MASKED, MIXED

# A mixed cell counts half, and is cut no finer than this share of a side;
# nor are there more cells than so many.
_FINEST = 2048
_MOST_CELLS = 1 << 15
_BLOCK = 128
_WEIGHT = (0.0, 1.0, 0.5)  # masked, clear, mixed


def kept_share(pairs: Pairs) -> float:
    """Pairs that the mask keeps over those there are without it, above 0 and up to 1, by halves of
    halves; 1 without a mask. Half of the border counts, which is one part in ``_FINEST`` of a side
    wide unless there is very much of it."""
    ask, n_queries, n_keys = pairs.verdict, pairs.n_queries, pairs.n_keys
    if ask is None:
        return 1.0
    if pairs.share is not None:
        return min(1.0, max(pairs.share, 1e-6))
    finest = max(_BLOCK, -(-max(n_queries, n_keys) // _FINEST))
    kept = every = 0.0
    cells = [(0, n_queries, 0, n_keys, False)]
    while cells:
        finer = []
        last = len(cells) > _MOST_CELLS
        for q0, q1, k0, k1, left_out in cells:
            if q0 >= q1 or k0 >= k1 or (pairs.is_causal and k0 >= q1):
                continue
            diagonal = pairs.is_causal and k1 - 1 > q0
            verdict = MASKED if left_out else ask(Ranges.of(q0, q1, k0, k1))
            settled = not diagonal and verdict is not MIXED
            if settled or last or max(q1 - q0, k1 - k0) <= finest:
                count = (q1 - q0) * (k1 - k0) * (0.5 if diagonal else 1.0)
                every += count
                kept += count * _WEIGHT[verdict]
                continue
            q, k = (q0 + q1 + 1) // 2, (k0 + k1 + 1) // 2
            for rows in ((q0, q), (q, q1)):
                finer += [(*rows, *columns, verdict is MASKED) for columns in ((k0, k), (k, k1))]
        cells = finer
    return min(1.0, max(kept / every, 1e-6)) if every else 1.0
