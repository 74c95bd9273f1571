"""FlexAttention's lists of FULL and PARTIAL blocks (``block_table.py``) for a whole task.

FlexAttention runs the listed blocks, and applies the mask in partial ones only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.kit.block_table import BLOCK, Ints, Nodes, TaskPairs, joined, some
from quorum_attention.kernels.torch_private import outside

# Parts of a buffer begin at multiples of this many int32: compiled code needs 16 bytes.
_ALIGNED = 64

Part = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class BlockLists:
    """A task's block lists on the host, in one buffer, which is sent to the device in one copy.

    Attributes:
        rows, columns: the local queries and keys from the first to the last listed block; the lists
            count from there.
        buffer: int32, on the host.
        parts: for every list, where it begins in the buffer, its shape and its strides. The lists
            are counts and indices of partial blocks by query, of full blocks by query, then both by
            key. If rectangles end within blocks, three more follow: the piece of every query, the
            piece of every key, and ``TaskPairs.table``.
        pruned, run: number of rectangles without a listed block, and with one.
    """

    rows: slice
    columns: slice
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
        """Whether rectangles end within blocks, so that partial blocks have to test the pieces."""
        return len(self.parts) > 8

    def on(self, device: torch.device) -> list[torch.Tensor]:
        """The lists as int32 tensors on ``device``, views of one tensor."""
        there = self.buffer.to(device, non_blocking=True)
        # as_strided costs the host less than a slice and a view.
        return [
            there.as_strided(shape, strides, start).detach() for start, shape, strides in self.parts
        ]


def block_lists(
    pairs: TaskPairs,
    full: Nodes,
    partial: Nodes,
    lanes: tuple[int, int] = (1, 1),
    pinned: bool = False,
) -> BlockLists | None:
    """The block lists of disjoint nodes, cropped to their range; None without any.

    Args:
        pairs: the task's pairs.
        full, partial: the nodes (``block_table.listed_blocks``). A full block that reaches beyond
            the last query or key is listed as partial, because FlexAttention expects that.
        lanes: number of batch entries and of heads that have lists of their own
            (lane = entry * heads + head).
        pinned: whether the buffer is in page-locked memory.
    """
    full, edge = _without_edge(full, len(pairs.queries), len(pairs.keys))
    partial = joined([partial, edge])
    every = joined([full, partial])
    if not len(every):
        return None
    top, bottom = int(every[:, 1].min()), int(every[:, 2].max())
    left, right = int(every[:, 3].min()), int(every[:, 4].max())
    rows = slice(top * BLOCK, min(bottom * BLOCK, len(pairs.queries)))
    columns = slice(left * BLOCK, min(right * BLOCK, len(pairs.keys)))
    shift = np.array([0, top, top, left, left], dtype=np.int64)
    heights, widths = slice(1, 3), slice(3, 5)
    arrays: list[NDArray[Any]] = []
    for size, along, across in ((bottom - top, heights, widths), (right - left, widths, heights)):
        kinds = [
            _listed(nodes[:, 0] * size, nodes[:, along], nodes[:, across], size * math.prod(lanes))
            for nodes in (partial - shift, full - shift)
        ]
        arrays += _tables(kinds, (*lanes, size))
    pieces = pairs.pieces
    if pieces is not None and _cut_within_blocks(pairs, rows, columns):
        # At least 2 x 2, because torch.compile specialises code to sizes of 1.
        table = np.pad(pieces.table, [(0, max(0, 2 - size)) for size in pieces.table.shape])
        arrays += [pieces.rows[rows], pieces.columns[columns], table]
    run = sum(_any_in(r, every) for r in pairs.rectangles)
    buffer, parts = _packed(arrays, pinned)
    return BlockLists(rows, columns, buffer, parts, len(pairs.rectangles) - run, run)


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
    total = int(lengths.sum())
    dtype = np.int32 if total > 1 << 20 else np.int64
    before = np.cumsum(lengths) - lengths
    found = np.repeat((starts - before).astype(dtype), lengths)
    found += np.arange(total, dtype=dtype)
    return found


def _tables(
    kinds: list[tuple[NDArray[np.int32], NDArray[np.int32]]], shape: tuple[int, ...]
) -> list[NDArray[np.int32]]:
    """Counts and indices of partial and of full blocks.

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


def _cut_within_blocks(pairs: TaskPairs, rows: slice, columns: slice) -> bool:
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
