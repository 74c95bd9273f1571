"""How much of a call a mask leaves, for predictions of its time."""

from __future__ import annotations

from quorum_attention.kernels.kit.masks import BlockMask, Ranges

# A cell that is neither empty nor full counts half, and is cut no finer than this share of a side.
_FINEST = 2048
_BLOCK = 128


def kept_share(mask: BlockMask, n_queries: int, n_keys: int, is_causal: bool) -> float:
    """Pairs that ``mask`` keeps over those there are without it, above 0 and up to 1; by halves of
    halves, within about one part in ``_FINEST`` of all pairs."""
    finest = max(_BLOCK, -(-max(n_queries, n_keys) // _FINEST))
    kept = every = 0.0
    cells = [(0, n_queries, 0, n_keys, False)]
    while cells:
        q0, q1, k0, k1, left_out = cells.pop()
        if q0 >= q1 or k0 >= k1 or (is_causal and k0 >= q1):
            continue
        diagonal = is_causal and k1 - 1 > q0
        verdict = "empty" if left_out else mask.verdict(Ranges(q0, q1 - 1, k0, k1 - 1))
        last = max(q1 - q0, k1 - k0) <= finest
        if last or (not diagonal and verdict != "mixed"):
            pairs = (q1 - q0) * (k1 - k0) * (0.5 if diagonal else 1.0)
            every += pairs
            kept += pairs * {"empty": 0.0, "mixed": 0.5, "full": 1.0}[verdict]
            continue
        q, k = (q0 + q1 + 1) // 2, (k0 + k1 + 1) // 2
        for rows in ((q0, q), (q, q1)):
            cells += [(*rows, *columns, verdict == "empty") for columns in ((k0, k), (k, k1))]
    return min(1.0, max(kept / every, 1e-6)) if every else 1.0
