"""Which blocks of a task, 128 queries by 128 keys, a geometry keeps: masked, clear or mixed.

A quadtree over the blocks is followed down as far as verdicts are mixed. Where a user's function
decides, or there are too many nodes, blocks are tried on the device (``trying.py``), once for as
long as the mask lives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Ranges
from quorum_attention.kernels.kit.block_masks import BLOCK, Nodes
from quorum_attention.kernels.kit.block_masks import Geometry as Pairs
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.trying import UNTRIED, Codes

_Ints = NDArray[np.int64]
# More nodes of a level than this, and what is left is tried on the device.
_MOST_NODES = 1 << 14


def codes_of(geometry: Geometry, pairs: Pairs) -> Codes:
    """The verdict of every block of the grid, or UNTRIED; (block rows, block columns) int8.

    Args:
        pairs: those of the task's rectangles.
    """
    rows, columns = pairs.grid
    codes = np.zeros((rows, columns), dtype=np.int8)
    nodes: Nodes = np.array([[0, 0, rows, 0, columns]], dtype=np.int64)
    if not (rows and columns and pairs.rectangles):
        return codes
    asked, opaque = _asker(geometry), geometry.opaque
    while len(nodes):
        inside = pairs.verdicts(nodes)
        nodes, inside = nodes[inside != EMPTY], inside[inside != EMPTY]
        if len(nodes) > _MOST_NODES:
            _fill(codes, nodes, np.full(len(nodes), UNTRIED))
            break
        found = np.array([asked(r) for r in _ranges(pairs, nodes)], dtype=np.int8)
        # Of a part of the pairs of a block, its verdict is not that of functions alone.
        found[(found != EMPTY) & (inside == PARTIAL)] = PARTIAL
        single = (nodes[:, 2] - nodes[:, 1] == 1) & (nodes[:, 4] - nodes[:, 3] == 1)
        if opaque:
            found[single & (found == PARTIAL)] = UNTRIED
        settled = single | (found != PARTIAL)
        _fill(codes, nodes[settled], found[settled])
        nodes = _quarters(nodes[~settled])
    return codes


def _bounds(first: _Ints, stop: _Ints, tokens: _Ints) -> tuple[_Ints, _Ints]:
    """The first and the last position of blocks ``first`` to ``stop``."""
    return tokens[first * BLOCK], tokens[np.minimum(stop * BLOCK, len(tokens)) - 1]


def _asker(geometry: Geometry) -> Callable[[Ranges], int]:
    """The verdict of a block; UNTRIED where it is for functions alone to decide."""
    if not geometry.opaque:
        return geometry.verdict

    def asked(block: Ranges) -> int:
        most = geometry.verdict(block, FULL)
        if most is EMPTY:
            return EMPTY
        least = geometry.verdict(block, EMPTY)
        if least is FULL:
            return FULL
        return UNTRIED if most is FULL and least is EMPTY else PARTIAL

    return asked


def _ranges(pairs: Pairs, nodes: Nodes) -> list[Ranges]:
    """The positions of nodes; between the first and the last there may be others' tokens."""
    sides = []
    for tokens, at in ((pairs.queries, 1), (pairs.keys, 3)):
        first, last = _bounds(nodes[:, at], nodes[:, at + 1], tokens)
        sides += [first.tolist(), (last + 1).tolist()]
    return [Ranges.of(*block) for block in zip(*sides, strict=True)]


def _fill(codes: Codes, nodes: Nodes, found: Codes) -> None:
    for (_, top, bottom, left, right), code in zip(nodes.tolist(), found.tolist(), strict=True):
        codes[top:bottom, left:right] = code


def _quarters(nodes: Nodes) -> Nodes:
    """Nodes of several blocks, cut in the middle of each side that has several."""
    lane, row, bottom, column, right = nodes.T
    middle, centre = (row + bottom + 1) // 2, (column + right + 1) // 2
    parts = [
        np.stack([lane, a, b, c, d], axis=1)
        for a, b in ((row, middle), (middle, bottom))
        for c, d in ((column, centre), (centre, right))
    ]
    every = np.concatenate(parts)
    found: Nodes = every[(every[:, 1] < every[:, 2]) & (every[:, 3] < every[:, 4])]
    return found
