"""The share of a call's pairs that its mask keeps, for predictions of its time."""

from __future__ import annotations

from quorum_attention.decomposition.pairs import Pairs, Ranges
from quorum_attention.decomposition.quadtree import quarters, walk
from quorum_attention.decomposition.verdicts import EMPTY, PARTIAL, Verdict

# Mixed cells are cut until their sides are 1 / _FINEST of the call's longer side, or _BLOCK
# tokens, or until a level has more than _MOST_CELLS cells.
_FINEST = 2048
_MOST_CELLS = 1 << 15
_BLOCK = 128
# The share of pairs that a masked, a clear and a mixed cell are taken to keep.
_WEIGHT = (0.0, 1.0, 0.5)


def kept_share(pairs: Pairs) -> float:
    """An estimate of the pairs that the mask keeps, over the pairs there are without it.

    It is above 0 and at most 1; 1 without a mask. Cells on the mask's border count half.
    """
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
        return EMPTY if cell[1] else ask(cell[0])

    def parts(cell: _Cell, found: Verdict) -> list[_Cell]:
        if found is not PARTIAL and not is_causal:
            return []
        block, _, level = cell
        (q0, q1), (k0, k1) = block
        if found is not PARTIAL and k1 - 1 <= q0:
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
        masked = found is EMPTY
        return [(part, masked, level) for part in finer]

    kept = every = 0.0
    root = (Ranges.of(0, pairs.n_queries, 0, pairs.n_keys), False, 0)
    for (((q0, q1), (k0, k1)), _, _), found in walk(root, verdict, parts, by_level=True):
        # A causal call has half the pairs of a block on the diagonal.
        count = (q1 - q0) * (k1 - k0) * (0.5 if is_causal and k1 - 1 > q0 else 1.0)
        every += count
        kept += count * _WEIGHT[found]
    return min(1.0, max(kept / every, 1e-6))


_Cell = tuple[Ranges, bool, int]
"""A block; whether the mask is known to keep none of its pairs; and its level, 0 for the root."""
