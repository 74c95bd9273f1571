"""How much of a call a mask leaves, for predictions of its time."""

from __future__ import annotations

from quorum_attention.decomposition.pairs import Pairs, Ranges
from quorum_attention.decomposition.quadtree import quarters, walk
from quorum_attention.decomposition.verdicts import MASKED, MIXED, Verdict

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
    ask, is_causal = pairs.verdict, pairs.is_causal
    if ask is None:
        return 1.0
    if pairs.share is not None:
        return min(1.0, max(pairs.share, 1e-6))
    if not pairs.n_queries or not pairs.n_keys:
        return 1.0
    finest = max(_BLOCK, -(-max(pairs.n_queries, pairs.n_keys) // _FINEST))
    cells_of_level = [1]

    def verdict(cell: _Cell) -> Verdict:
        return MASKED if cell[1] else ask(cell[0])

    def parts(cell: _Cell, found: Verdict) -> list[_Cell]:
        block, _, level = cell
        (q0, q1), (k0, k1) = block
        if found is not MIXED and not (is_causal and k1 - 1 > q0):
            return []
        if (q1 - q0 <= finest and k1 - k0 <= finest) or cells_of_level[level] > _MOST_CELLS:
            return []
        level += 1
        if level == len(cells_of_level):
            cells_of_level.append(0)
        cells_of_level[level] += 4
        finer = quarters(block)
        if is_causal and k1 > q0:
            finer = [part for part in finer if part[1][0] < part[0][1]]
        masked = found is MASKED
        return [(part, masked, level) for part in finer]

    kept = every = 0.0
    root = (Ranges.of(0, pairs.n_queries, 0, pairs.n_keys), False, 0)
    for (((q0, q1), (k0, k1)), _, _), found in walk(root, verdict, parts, by_level=True):
        # Of a block on the diagonal half is there.
        count = (q1 - q0) * (k1 - k0) * (0.5 if is_causal and k1 - 1 > q0 else 1.0)
        every += count
        kept += count * _WEIGHT[found]
    return min(1.0, max(kept / every, 1e-6))


_Cell = tuple[Ranges, bool, int]
"""A block that has pairs without the mask; whether the mask is known to keep none of them; and how
often the whole was cut."""
