"""FlexAttention's block lists for a whole task, without a test of every block.

A block is 128 queries by 128 keys of a task; it is masked, clear or mixed. A quadtree over the
blocks is followed down until a node is masked or clear. So the cost is that of the border between
masked and clear blocks, and of the blocks listed. FlexAttention runs the listed blocks, and applies
the mask in mixed ones only. (It calls clear blocks full.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import (
    EMPTY,
    FULL,
    PARTIAL,
    Ranges,
    Rectangle,
    Task,
    Verdict,
)
from quorum_attention.decomposition.verdicts import both
from quorum_attention.kernels.kit.masks import BlockMask
from quorum_attention.kernels.outside import outside

BLOCK = 128
# Parts of a buffer begin at multiples of this many int32: compiled code needs 16 bytes.
_ALIGNED = 64
_BOTH = np.array([[both(one, other) for other in Verdict] for one in Verdict], dtype=np.int8)

Ints = NDArray[np.int64]
Part = tuple[int, tuple[int, ...], tuple[int, ...]]
Nodes = Ints
"""Nodes of the quadtree, (k, 5): lane, first block row, last + 1, first block column, last + 1."""


@dataclass(frozen=True)
class Geometry:
    """The pairs of a task, before any mask.

    Attributes:
        rectangles: disjoint, in local positions.
        is_causal: whether keys after the query are masked.
        queries, keys: (nq,) and (nk,) global positions, ascending.
    """

    rectangles: tuple[Rectangle, ...]
    is_causal: bool
    queries: Ints
    keys: Ints

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        return -(-len(self.queries) // BLOCK), -(-len(self.keys) // BLOCK)

    @cached_property
    def query_edges(self) -> Ints:
        """Where rectangles begin or end along the queries; with 0 and nq."""
        return _edges(len(self.queries), [(r.query_start, r.query_stop) for r in self.rectangles])

    @cached_property
    def key_edges(self) -> Ints:
        """Where rectangles begin or end along the keys; with 0 and nk."""
        return _edges(len(self.keys), [(r.key_start, r.key_stop) for r in self.rectangles])

    @cached_property
    def table(self) -> NDArray[np.bool_]:
        """(query pieces, key pieces): whether a rectangle holds the piece between these edges."""
        found = np.zeros((len(self.query_edges) - 1, len(self.key_edges) - 1), dtype=np.bool_)
        for r in self.rectangles:
            rows = np.searchsorted(self.query_edges, (r.query_start, r.query_stop))
            columns = np.searchsorted(self.key_edges, (r.key_start, r.key_stop))
            found[rows[0] : rows[1], columns[0] : columns[1]] = True
        return found

    @cached_property
    def _sums(self) -> Ints:
        """Summed-area table of ``table``: how many pieces above and to the left rectangles hold."""
        found = np.zeros(np.add(self.table.shape, 1), dtype=np.int64)
        found[1:, 1:] = self.table.cumsum(axis=0, dtype=np.int64).cumsum(axis=1)
        return found

    def verdicts(self, nodes: Nodes) -> NDArray[np.int8]:
        """For every node: EMPTY, FULL, or PARTIAL."""
        q0, q1 = nodes[:, 1] * BLOCK, np.minimum(nodes[:, 2] * BLOCK, len(self.queries)) - 1
        k0, k1 = nodes[:, 3] * BLOCK, np.minimum(nodes[:, 4] * BLOCK, len(self.keys)) - 1
        top, bottom = piece(self.query_edges, q0), piece(self.query_edges, q1) + 1
        left, right = piece(self.key_edges, k0), piece(self.key_edges, k1) + 1
        s = self._sums
        there = s[bottom, right] - s[top, right] - s[bottom, left] + s[top, left]
        every = (bottom - top) * (right - left)
        found = np.where(there == 0, EMPTY, np.where(there == every, FULL, PARTIAL))
        if self.is_causal:
            later = np.where(self.keys[k1] <= self.queries[q0], FULL, PARTIAL)
            later[self.keys[k0] > self.queries[q1]] = EMPTY
            found = _both(found, later)
        return found.astype(np.int8)


def geometry(
    task: Task, rectangles: Sequence[Rectangle], is_causal: bool, n_queries: int, n_keys: int
) -> Geometry:
    """A task's pairs; its first ``n_queries`` tokens are queries, its first ``n_keys`` are keys."""
    tokens = np.concatenate(
        [np.arange(first, last, dtype=np.int64) for first, last, _ in task.runs]
        or [np.zeros(0, dtype=np.int64)]
    )
    kept = tuple(r for r in rectangles if r.n_queries and r.n_keys)
    return Geometry(kept, is_causal, tokens[:n_queries], tokens[:n_keys])


def listed_nodes(pairs: Geometry, mask: BlockMask | None) -> tuple[Nodes, Nodes]:
    """(clear, mixed) nodes of the blocks that may keep a pair; all in lane 0.

    A block that reaches beyond the last query or key is mixed, because FlexAttention expects that.
    """
    rows, columns = pairs.grid
    nodes = np.array([[0, 0, rows, 0, columns]], dtype=np.int64)
    clear, mixed = [], []
    if not (rows and columns and pairs.rectangles):
        nodes = nodes[:0]
    while len(nodes):
        found = pairs.verdicts(nodes)
        if mask is not None:
            some = np.flatnonzero(found)
            found[some] = _both(found[some], _asked(mask, pairs, nodes[some]))
        clear.append(nodes[found == FULL])
        rest = nodes[found == PARTIAL]
        single = (rest[:, 2] - rest[:, 1] == 1) & (rest[:, 4] - rest[:, 3] == 1)
        mixed.append(rest[single])
        nodes = _quarters(rest[~single])
    inner, edge = _without_edge(joined(clear), len(pairs.queries), len(pairs.keys))
    return inner, joined([*mixed, edge])


def _asked(mask: BlockMask, pairs: Geometry, nodes: Nodes) -> NDArray[np.int8]:
    q0 = pairs.queries[nodes[:, 1] * BLOCK].tolist()
    q1 = (pairs.queries[np.minimum(nodes[:, 2] * BLOCK, len(pairs.queries)) - 1] + 1).tolist()
    k0 = pairs.keys[nodes[:, 3] * BLOCK].tolist()
    k1 = (pairs.keys[np.minimum(nodes[:, 4] * BLOCK, len(pairs.keys)) - 1] + 1).tolist()
    verdict = mask.verdict
    found = [verdict(Ranges.of(*r)) for r in zip(q0, q1, k0, k1, strict=True)]
    return np.array(found, dtype=np.int8)


def _both(one: NDArray[np.int8], other: NDArray[np.int8]) -> NDArray[np.int8]:
    found: NDArray[np.int8] = _BOTH[one, other]
    return found


def _quarters(nodes: Nodes) -> Nodes:
    lane, row, bottom, column, right = nodes.T
    middle, centre = (row + bottom) // 2, (column + right) // 2
    parts = [
        np.stack([lane, a, b, c, d], axis=1)
        for a, b in ((row, middle), (middle, bottom))
        for c, d in ((column, centre), (centre, right))
    ]
    return _some(joined(parts))


def _without_edge(nodes: Nodes, n_queries: int, n_keys: int) -> tuple[Nodes, Nodes]:
    """``nodes`` cut into their whole blocks, and those beyond the last whole query or key block."""
    lane, row, bottom, column, right = nodes.T
    low, far = np.minimum(bottom, n_queries // BLOCK), np.minimum(right, n_keys // BLOCK)
    inner = np.stack([lane, row, low, column, far], axis=1)
    below = np.stack([lane, np.maximum(row, low), bottom, column, right], axis=1)
    beside = np.stack([lane, row, low, np.maximum(column, far), right], axis=1)
    return _some(inner), _some(joined([below, beside]))


def _some(nodes: Nodes) -> Nodes:
    return nodes[(nodes[:, 1] < nodes[:, 2]) & (nodes[:, 3] < nodes[:, 4])]


def joined(parts: list[Nodes]) -> Nodes:
    """All nodes of ``parts``, which may be empty."""
    return np.concatenate([np.zeros((0, 5), dtype=np.int64), *parts])


def _edges(size: int, ranges: list[tuple[int, int]]) -> Ints:
    return np.unique(np.array([0, size, *(e for r in ranges for e in r)], dtype=np.int64))


def piece(edges: Ints, where: Ints) -> Ints:
    """The number of the piece, between two edges, that each position lies in."""
    return np.searchsorted(edges, where, side="right") - 1


@dataclass(frozen=True, slots=True)
class BlockLists:
    """A task's block lists on the host, in one buffer, which is sent to the device in one copy.

    Attributes:
        rows, columns: the local queries and keys from the first to the last listed block; the lists
            count from there.
        first: block column of the first listed block in the first row.
        buffer: int32, on the host.
        parts: for every list, where it begins in the buffer, its shape and its strides. The lists
            are counts and indices of mixed blocks by query, of clear blocks by query, then both by
            key. If rectangles end within blocks, three more follow: the piece of every query, the
            piece of every key, and ``Geometry.table``.
        pruned, run: number of rectangles without a listed block, and with one.
    """

    rows: slice
    columns: slice
    first: int
    buffer: torch.Tensor
    parts: tuple[Part, ...]
    pruned: int
    run: int

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.numel() * 4

    @property
    def in_pieces(self) -> bool:
        """Whether rectangles end within blocks, so that mixed blocks have to test the pieces."""
        return len(self.parts) > 8

    def on(self, device: torch.device) -> list[torch.Tensor]:
        """The lists as int32 tensors on ``device``, views of one tensor."""
        there = self.buffer.to(device, non_blocking=True)
        # as_strided costs the host less than a slice and a view.
        return [
            there.as_strided(shape, strides, start).detach() for start, shape, strides in self.parts
        ]


def block_lists(
    pairs: Geometry,
    clear: Nodes,
    mixed: Nodes,
    lanes: tuple[int, int] = (1, 1),
    pinned: bool = False,
) -> BlockLists | None:
    """The block lists of ``clear`` and ``mixed`` nodes, cropped to their range; None without any.

    Args:
        pairs: the task's pairs.
        clear, mixed: disjoint nodes.
        lanes: number of batch entries and of heads that have lists of their own
            (lane = entry * heads + head).
        pinned: whether the buffer is in page-locked memory.
    """
    every = joined([clear, mixed])
    if not len(every):
        return None
    top, bottom = int(every[:, 1].min()), int(every[:, 2].max())
    left, right = int(every[:, 3].min()), int(every[:, 4].max())
    rows = slice(top * BLOCK, min(bottom * BLOCK, len(pairs.queries)))
    columns = slice(left * BLOCK, min(right * BLOCK, len(pairs.keys)))
    shift = np.array([0, top, top, left, left], dtype=np.int64)
    kinds = (mixed - shift, clear - shift)
    height, width = bottom - top, right - left
    by_query = [_listed(n[:, 0] * height, n[:, 1:3], n[:, 3:], height * lanes[0] * lanes[1])
                for n in kinds]  # fmt: skip
    by_key = [_listed(n[:, 0] * width, n[:, 3:], n[:, 1:3], width * lanes[0] * lanes[1])
              for n in kinds]  # fmt: skip
    arrays: list[NDArray[Any]] = [
        *_tables(by_query, (*lanes, height)),
        *_tables(by_key, (*lanes, width)),
    ]
    if _cut_within_blocks(pairs, rows, columns):
        arrays += [
            piece(pairs.query_edges, np.arange(rows.start, rows.stop)),
            piece(pairs.key_edges, np.arange(columns.start, columns.stop)),
            # At least 2 x 2, because torch.compile specialises code to sizes of 1.
            np.pad(pairs.table, [(0, max(0, 2 - size)) for size in pairs.table.shape]),
        ]
    first = int(every[every[:, 1] == top][:, 3].min()) - left
    run = sum(_any_in(r, every) for r in pairs.rectangles)
    buffer, parts = _packed(arrays, pinned)
    return BlockLists(rows, columns, first, buffer, parts, len(pairs.rectangles) - run, run)


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
    total = int(lengths.sum())
    dtype = np.int32 if total > 1 << 20 else np.int64
    before = np.cumsum(lengths) - lengths
    found = np.repeat((starts - before).astype(dtype), lengths)
    found += np.arange(total, dtype=dtype)
    return found


def _tables(
    kinds: list[tuple[NDArray[np.int32], NDArray[np.int32]]], shape: tuple[int, ...]
) -> list[NDArray[np.int32]]:
    """Counts and indices of mixed and of clear blocks.

    All tables have the width of the longest line, because torch's kernel uses the row stride of the
    first for both; and at least 2, because torch.compile specialises code to sizes of 1.
    """
    width = max(2, *(int(counts.max(initial=0)) for counts, _ in kinds))
    found = []
    for counts, entries in kinds:
        table = np.zeros((len(counts), width), dtype=np.int32)
        table[np.arange(width) < counts[:, None]] = entries
        found += [counts.reshape(shape), table.reshape(*shape, width)]
    return found


def _cut_within_blocks(pairs: Geometry, rows: slice, columns: slice) -> bool:
    for edges, part in ((pairs.query_edges, rows), (pairs.key_edges, columns)):
        inside = edges[(edges > part.start) & (edges < part.stop)]
        if (inside % BLOCK).any():
            return True
    return False


def _any_in(r: Rectangle, nodes: Nodes) -> bool:
    _, row, bottom, column, right = nodes.T
    down = (row * BLOCK < r.query_stop) & (bottom * BLOCK > r.query_start)
    return bool((down & (column * BLOCK < r.key_stop) & (right * BLOCK > r.key_start)).any())


def _packed(arrays: list[NDArray[Any]], pinned: bool) -> tuple[torch.Tensor, tuple[Part, ...]]:
    parts: list[Part] = []
    at = 0
    for array in arrays:
        strides = tuple(math.prod(array.shape[i + 1 :]) for i in range(array.ndim))
        parts.append((at, array.shape, strides))
        at += -(-array.size // _ALIGNED) * _ALIGNED
    with outside():  # because it is cached
        buffer = torch.zeros(at, dtype=torch.int32, pin_memory=pinned, device="cpu")
    host = buffer.numpy()
    for (start, _, _), array in zip(parts, arrays, strict=True):
        host[start : start + array.size] = array.reshape(-1)
    return buffer, tuple(parts)
