"""Which blocks of a task, 128 queries by 128 keys, a mask keeps: FULL, PARTIAL or EMPTY.

A quadtree over the blocks is followed down as far as its nodes are partial, so its cost is that of
the border between full and empty blocks, and there is no grid of all blocks. Blocks that only a
user's function can tell are UNKNOWN until a ``BlockEvaluator`` has called it for each of their
pairs, on the device. The native kernel makes its runs of the nodes, FlexAttention gets their lists.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Ranges, Rectangle, Task
from quorum_attention.kernels.masked.geometry import FunctionRule, Geometry
from quorum_attention.kernels.protocol import Indices, TaskTensors
from quorum_attention.kernels.tensors import positions
from quorum_attention.kernels.torch_private import outside

BLOCK = 128
UNKNOWN = 3
"""The code of a block beside those of verdicts: a function has to be called for its pairs."""

PAIR_BYTES = 64
"""Device bytes for each pair that is evaluated at a time: a function's own temporaries, a few
tensors of int64, among them."""
MOST_NODES = 1 << 14
"""More nodes of a level than this, and what is left is evaluated on the device."""
SENT = 64
"""Blocks that are sent to the device at a time: that many times those evaluated at once."""

Ints = NDArray[np.int64]
Codes = NDArray[np.int8]
Nodes = Ints
"""Nodes of the quadtree, (k, 5): lane, first block row, last + 1, first block column, last + 1."""


class TaskPairs:
    """The pairs of a task, before any mask.

    Args:
        rectangles: disjoint, in local positions.
        sizes: queries and keys; None: up to the last of a rectangle.

    Attributes:
        queries, keys: (nq,) and (nk,) global positions, ascending.
        edges: where rectangles begin or end along the queries, with 0 and nq; and along the keys.
        table: (query pieces, key pieces) bool: whether a rectangle holds the piece between edges.
    """

    def __init__(
        self,
        task: Task,
        rectangles: Sequence[Rectangle],
        sizes: tuple[int, int] | None = None,
    ) -> None:
        runs = [np.arange(first, last, dtype=np.int64) for first, last, _ in task.runs]
        tokens = np.concatenate([np.zeros(0, dtype=np.int64), *runs])
        kept = [r for r in rectangles if r.n_queries and r.n_keys]
        sides = [
            np.array(ends, dtype=np.int64).reshape(-1, 2)
            for ends in (
                [(r.query_start, r.query_stop) for r in kept],
                [(r.key_start, r.key_stop) for r in kept],
            )
        ]
        lengths = sizes or [int(side.max(initial=0)) for side in sides]
        self.queries, self.keys = (tokens[:n] for n in lengths)
        self.edges = [np.unique(np.append(e, (0, n))) for e, n in zip(sides, lengths, strict=True)]
        self.table = np.zeros([len(edges) - 1 for edges in self.edges], dtype=np.bool_)
        rows, columns = map(np.searchsorted, self.edges, sides)
        for (top, bottom), (left, right) in zip(rows, columns, strict=True):
            self.table[top:bottom, left:right] = True
        # Summed-area table: how many pieces above and to the left rectangles hold.
        self._sums = np.pad(self.table.cumsum(0, dtype=np.int64).cumsum(1), ((1, 0), (1, 0)))

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        return -(-len(self.queries) // BLOCK), -(-len(self.keys) // BLOCK)

    @property
    def pieces(self) -> tuple[Ints, Ints, NDArray[np.bool_]] | None:
        """The piece between edges that each query and each key lies in, and ``table``; None if the
        rectangles are all pairs."""
        if self.table.all():
            return None
        rows, columns = np.arange(len(self.queries)), np.arange(len(self.keys))
        return _piece(self.edges[0], rows), _piece(self.edges[1], columns), self.table

    def _bounds(self, nodes: Nodes) -> tuple[Ints, Ints, Ints, Ints]:
        """The first and last local query, and the first and last local key, of each node."""
        _, top, bottom, left, right = nodes.T * BLOCK
        last_query = np.minimum(bottom, len(self.queries)) - 1
        return top, last_query, left, np.minimum(right, len(self.keys)) - 1

    def codes(self, nodes: Nodes) -> Codes:
        """For every node: EMPTY, FULL, or PARTIAL."""
        q0, q1, k0, k1 = self._bounds(nodes)
        top, bottom = _piece(self.edges[0], q0), _piece(self.edges[0], q1) + 1
        left, right = _piece(self.edges[1], k0), _piece(self.edges[1], k1) + 1
        s = self._sums
        there = s[bottom, right] - s[top, right] - s[bottom, left] + s[top, left]
        every = (bottom - top) * (right - left)
        found = np.where(there == 0, EMPTY, np.where(there == every, FULL, PARTIAL))
        return found.astype(np.int8)

    def positions(self, nodes: Nodes) -> Iterator[Ranges]:
        """The positions of nodes; between the first and the last there may be others' tokens."""
        q0, q1, k0, k1 = self._bounds(nodes)
        ends = (self.queries[q0], self.queries[q1] + 1, self.keys[k0], self.keys[k1] + 1)
        return (Ranges.of(*block) for block in zip(*(end.tolist() for end in ends), strict=True))


def classify(pairs: TaskPairs, geometry: Geometry) -> dict[int, Nodes]:
    """The FULL, the PARTIAL and the UNKNOWN nodes of a task; all other blocks are EMPTY.

    Where the functions of the geometry that say nothing of blocks decide, and where they might
    empty a block that is partial anyway, it is UNKNOWN.
    """
    rows, columns = pairs.grid
    known = tuple(rule for rule in geometry.rules if not isinstance(rule, FunctionRule))
    opaque, geometry = len(known) < len(geometry.rules), replace(geometry, rules=known)
    found: dict[int, list[Nodes]] = {FULL: [], PARTIAL: [], UNKNOWN: []}
    nodes: Nodes = np.array([[0, 0, rows, 0, columns]], dtype=np.int64)
    if not (rows and columns):
        nodes = nodes[:0]
    while len(nodes):
        codes = pairs.codes(nodes)
        nodes, codes = nodes[codes != EMPTY], codes[codes != EMPTY]
        if (opaque or geometry.functions) and len(nodes) > MOST_NODES:
            found[UNKNOWN].append(nodes)
            break
        if not geometry.keeps_all:
            asked = np.array([geometry.verdict(r) for r in pairs.positions(nodes)], dtype=np.int8)
            # Of a part of a node's pairs, the verdict on all of them says only that there are none.
            codes = np.where((codes == FULL) | (asked == EMPTY), asked, codes)
        single = (nodes[:, 2] - nodes[:, 1] == 1) & (nodes[:, 4] - nodes[:, 3] == 1)
        if opaque or geometry.functions:
            codes[(opaque & (codes == FULL)) | (single & (codes == PARTIAL))] = UNKNOWN
        for code in (FULL, UNKNOWN):
            found[code].append(nodes[codes == code])
        found[PARTIAL].append(nodes[single & (codes == PARTIAL)])
        nodes = _quarters(nodes[~single & (codes == PARTIAL)])
    return {code: joined(parts) for code, parts in found.items()}


@outside()
def listed_blocks(
    geometry: Geometry,
    task: TaskTensors,
    pairs: TaskPairs,
    nbytes: int,
    *,
    by_lane: bool = False,
) -> tuple[Nodes, Nodes, tuple[int, int]]:
    """(FULL nodes, PARTIAL nodes, lanes).

    Args:
        nbytes: for evaluating functions.
        by_lane: whether entries and heads in which a function differs have blocks of their own
            (of a geometry that is no more than a function); otherwise these are PARTIAL for all.
    """
    found = classify(pairs, geometry)
    full, partial, unknown = [found[FULL]], [found[PARTIAL]], blocks_in(found[UNKNOWN])
    if not unknown.shape[1]:
        return full[0], partial[0], (1, 1)
    evaluator = BlockEvaluator(geometry, task, pairs)
    codes = evaluator.codes(unknown, nbytes).reshape(unknown.shape[1], -1)
    lanes = evaluator.lanes
    if not by_lane:
        same = (codes == codes[:, :1]).all(axis=1)
        lanes, codes = (1, 1), np.where(same, codes[:, 0], PARTIAL)[:, None]
    for code, nodes in ((FULL, full), (PARTIAL, partial)):
        number, lane = np.nonzero(codes == code)
        row, column = unknown[:, number]
        nodes.append(np.stack([lane, row, row + 1, column, column + 1], axis=1))
    return joined(full), joined(partial), lanes


def blocks_key(
    geometry: Geometry, task: TaskTensors, rectangles: tuple[Rectangle, ...]
) -> tuple[Hashable, ...]:
    """All that the blocks of rectangles of a task depend on, as far as it can be seen."""
    device = task.query.device
    entries, heads = geometry.depends(device)
    return (
        task.task, rectangles, device.type, geometry.seen, task.entries if entries else (),
        (task.first_head, task.query.shape[1]) if heads else (),
    )  # fmt: skip


def evaluated_bytes(lanes: int, nbytes: int) -> int:
    """Bound of the bytes that ``listed_blocks`` with so many takes, for a function that differs in
    ``lanes`` heads and batch entries."""
    return max(nbytes, PAIR_BYTES * BLOCK * BLOCK * lanes)


class BlockEvaluator:
    """Evaluates which pairs of blocks of a task a geometry keeps, on its device."""

    def __init__(self, geometry: Geometry, task: TaskTensors, pairs: TaskPairs) -> None:
        device, first = task.query.device, task.first_head
        depends = geometry.depends(device)
        self._geometry = geometry
        self._entries = torch.tensor(task.entries[: None if depends[0] else 1], device=device)
        heads = task.query.shape[1] if depends[1] else 1
        self._heads = torch.arange(first, first + heads, device=device)
        self._queries, self._keys = (
            _padded(positions(task.task, 0, len(side), device))
            for side in (pairs.queries, pairs.keys)
        )
        self._table: torch.Tensor | None = None
        pieces = pairs.pieces
        if pieces is not None:
            *sides, table = (torch.from_numpy(part).to(device) for part in pieces)
            self._rows, self._columns = map(_padded, sides)
            self._table = table

    @property
    def lanes(self) -> tuple[int, int]:
        """(entries, heads) for which blocks are evaluated."""
        return len(self._entries), len(self._heads)

    @outside()
    def codes(self, blocks: Ints, nbytes: int) -> Codes:
        """FULL, PARTIAL or EMPTY, (blocks, entries, heads).

        Args:
            blocks: (2, blocks), their rows and columns.
            nbytes: for evaluating them.
        """
        found = [np.zeros((0, *self.lanes), dtype=np.int8)]
        at_once = max(1, nbytes // (PAIR_BYTES * BLOCK * BLOCK * math.prod(self.lanes)))
        for start in range(0, blocks.shape[1], SENT * at_once):
            sent = torch.from_numpy(blocks[:, start : start + SENT * at_once])
            sent = sent.to(self._queries.device)
            parts = [self._codes(*some) for some in sent.split(at_once, dim=1)]
            found.append(torch.cat(parts).cpu().numpy())
        return np.concatenate(found)

    def _codes(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        count = self.kept(rows, columns).sum(dim=(3, 4), dtype=torch.int64)
        codes = (count > 0).to(torch.int8) * PARTIAL
        return codes.masked_fill_(count == BLOCK * BLOCK, FULL)

    def kept(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Which pairs of blocks are kept: (blocks, entries, heads, 128, 128) bool."""
        within = torch.arange(BLOCK, device=rows.device)
        r, c = (blocks[:, None] * BLOCK + within for blocks in (rows, columns))
        queries, keys = self._queries[r], self._keys[c]
        kept: torch.Tensor = torch.vmap(self._of_block)(queries, keys)
        if self._table is not None:
            pieces = self._rows[r][:, :, None], self._columns[c][:, None]
            kept = kept & self._table[pieces][:, None, None]
        return kept

    def _of_block(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which pairs are kept: bool, (entries, heads, queries, keys)."""
        found = self._geometry.keeps(Indices(self._entries, self._heads, queries, keys))
        return found.expand(*self.lanes, BLOCK, BLOCK).contiguous()


def blocks_in(nodes: Nodes) -> Ints:
    """(2, blocks): row and column of every block in ``nodes``."""
    heights, widths = nodes[:, 2] - nodes[:, 1], nodes[:, 4] - nodes[:, 3]
    sizes = heights * widths
    node = np.repeat(np.arange(len(nodes)), sizes)
    number = np.arange(len(node)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    row, column = np.divmod(number, widths[node])
    return np.stack([nodes[node, 1] + row, nodes[node, 3] + column])


def joined_along_rows(blocks: Nodes) -> Nodes:
    """Single blocks of one lane, neighbours in a row joined."""
    blocks = blocks[np.lexsort((blocks[:, 3], blocks[:, 1]))]
    beside = (blocks[1:, 1] == blocks[:-1, 1]) & (blocks[1:, 3] == blocks[:-1, 4])
    first, last = np.ones((2, len(blocks)), dtype=bool)
    first[1:], last[:-1] = ~beside, ~beside
    return np.concatenate([blocks[first, :4], blocks[last, 4:]], axis=1)


def some(nodes: Nodes) -> Nodes:
    """The nodes that hold a block."""
    return nodes[(nodes[:, 1] < nodes[:, 2]) & (nodes[:, 3] < nodes[:, 4])]


def joined(parts: list[Nodes]) -> Nodes:
    """All nodes of ``parts``, which may be empty."""
    return np.concatenate([np.zeros((0, 5), dtype=np.int64), *parts])


def _piece(edges: Ints, where: Ints) -> Ints:
    """The number of the piece, between two edges, that each position lies in."""
    return np.searchsorted(edges, where, side="right") - 1


def _quarters(nodes: Nodes) -> Nodes:
    lane, row, bottom, column, right = nodes.T
    middle, centre = (row + bottom) // 2, (column + right) // 2
    parts = [
        np.stack([lane, a, b, c, d], axis=1)
        for a, b in ((row, middle), (middle, bottom))
        for c, d in ((column, centre), (centre, right))
    ]
    return some(joined(parts))


def _padded(tokens: torch.Tensor) -> torch.Tensor:
    """``tokens`` (n,), the last of them repeated up to whole blocks."""
    missing = -len(tokens) % BLOCK
    return torch.cat([tokens, tokens[-1:].expand(missing)]) if missing else tokens


# FlexAttention's lists of FULL and PARTIAL blocks for a whole task. It runs the listed blocks, and
# applies the mask in partial ones only.


def block_lists(
    pairs: TaskPairs,
    full: Nodes,
    partial: Nodes,
    lanes: tuple[int, int] = (1, 1),
    pinned: bool = False,
) -> list[torch.Tensor]:
    """A task's block lists, of disjoint nodes, int32 on the host; none where nothing is kept.

    They are counts and indices of partial blocks by query, of full blocks by query, then both by
    key. If rectangles end within blocks, three more follow, by which partial blocks have to test
    the pieces: the piece of every query, the piece of every key, and ``TaskPairs.table``.

    Args:
        pairs: the task's pairs.
        full, partial: the nodes (``listed_blocks``). A full block that reaches beyond the last
            query or key is listed as partial, because FlexAttention expects that.
        lanes: number of batch entries and of heads that have lists of their own
            (lane = entry * heads + head).
        pinned: whether they are in page-locked memory.
    """
    full, edge = _without_edge(full, len(pairs.queries), len(pairs.keys))
    partial = joined([partial, edge])
    if not len(full) + len(partial):
        return []
    heights, widths = slice(1, 3), slice(3, 5)
    arrays: list[NDArray[Any]] = []
    for size, along, across in zip(pairs.grid, (heights, widths), (widths, heights), strict=True):
        lines = size * math.prod(lanes)
        kinds = [
            _listed(nodes[:, 0] * size, nodes[:, along], nodes[:, across], lines)
            for nodes in (partial, full)
        ]
        # All tables have the width of the longest line, because torch's kernel uses the row stride
        # of the first for both; and at least 2: torch.compile specialises code to sizes of 1.
        width = max(2, *(int(counts.max(initial=0)) for counts, _ in kinds))
        for counts, entries in kinds:
            table = np.zeros((lines, width), dtype=np.int32)
            table[np.arange(width) < counts[:, None]] = entries
            arrays += [counts.reshape(*lanes, size), table.reshape(*lanes, size, width)]
    pieces = pairs.pieces
    if pieces is not None and any((edges[:-1] % BLOCK).any() for edges in pairs.edges):
        *of_sides, held = pieces
        # At least 2 x 2, as above.
        arrays += [*of_sides, np.pad(held, [(0, max(0, 2 - size)) for size in held.shape])]
    with outside():  # because they are cached
        lists = [torch.from_numpy(array.astype(np.int32)) for array in arrays]
        return [each.pin_memory() for each in lists] if pinned else lists


def _without_edge(nodes: Nodes, n_queries: int, n_keys: int) -> tuple[Nodes, Nodes]:
    """``nodes`` cut into their whole blocks, and those beyond the last whole query or key block."""
    lane, row, bottom, column, right = nodes.T
    low, far = np.minimum(bottom, n_queries // BLOCK), np.minimum(right, n_keys // BLOCK)
    inner = np.stack([lane, row, low, column, far], axis=1)
    below = np.stack([lane, np.maximum(row, low), bottom, column, right], axis=1)
    beside = np.stack([lane, row, low, np.maximum(column, far), right], axis=1)
    return some(inner), some(joined([below, beside]))


def _listed(
    offset: Ints, lines: Ints, across: Ints, n_lines: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """How many blocks each line lists, and their indices, line after line, ascending."""
    heights = lines[:, 1] - lines[:, 0]
    line = _ranges(offset + lines[:, 0], heights)
    start, stop = np.repeat(across[:, 0], heights), np.repeat(across[:, 1], heights)
    order = np.lexsort((start, line))
    line, start, widths = line[order], start[order], (stop - start)[order]
    counts = np.bincount(line, weights=widths, minlength=n_lines)
    return counts.astype(np.int32), _ranges(start, widths).astype(np.int32, copy=False)


def _ranges(starts: Ints, lengths: Ints) -> NDArray[Any]:
    """``start``, ``start + 1``, ... of every range, one after the other."""
    before = np.cumsum(lengths) - lengths
    found = np.repeat((starts - before).astype(np.int32), lengths)
    found += np.arange(len(found), dtype=np.int32)
    return found
