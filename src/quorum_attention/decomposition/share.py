"""How much of a call a mask leaves, for predictions of its time."""

from __future__ import annotations

from quorum_attention.decomposition.pairs import Pairs, Ranges

# A cell that is neither empty nor full counts half, and is cut no finer than this share of a side.
_FINEST = 2048
_BLOCK = 128


def kept_share(pairs: Pairs) -> float:
    """Pairs that the mask keeps over those there are without it, above 0 and up to 1; by halves of
    halves, within about one part in ``_FINEST`` of all pairs. 1 without a mask."""
    ask, n_queries, n_keys = pairs.verdict, pairs.n_queries, pairs.n_keys
    if ask is None:
        return 1.0
    finest = max(_BLOCK, -(-max(n_queries, n_keys) // _FINEST))
    kept = every = 0.0
    cells = [(0, n_queries, 0, n_keys, False)]
    while cells:
        q0, q1, k0, k1, left_out = cells.pop()
        if q0 >= q1 or k0 >= k1 or (pairs.is_causal and k0 >= q1):
            continue
        diagonal = pairs.is_causal and k1 - 1 > q0
        verdict = "empty" if left_out else ask(Ranges(q0, q1 - 1, k0, k1 - 1))
        last = max(q1 - q0, k1 - k0) <= finest
        if last or (not diagonal and verdict != "mixed"):
            count = (q1 - q0) * (k1 - k0) * (0.5 if diagonal else 1.0)
            every += count
            kept += count * {"empty": 0.0, "mixed": 0.5, "full": 1.0}[verdict]
            continue
        q, k = (q0 + q1 + 1) // 2, (k0 + k1 + 1) // 2
        for rows in ((q0, q), (q, q1)):
            cells += [(*rows, *columns, verdict == "empty") for columns in ((k0, k), (k, k1))]
    return min(1.0, max(kept / every, 1e-6)) if every else 1.0
