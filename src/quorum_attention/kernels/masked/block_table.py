"""Which blocks of a task, 128 queries by 128 keys, a mask keeps: FULL, PARTIAL or EMPTY.

A quadtree over the blocks is followed down as far as its nodes are partial, so its cost is that of
the border between full and empty blocks, and there is no grid of all blocks. Blocks that only a
user's function can tell are UNKNOWN until a ``BlockEvaluator`` has called it for each of their
pairs, on the device. The native kernel makes its runs of the nodes, FlexAttention gets their lists.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition import FULL, PARTIAL, Ranges, Rectangle, Task
from quorum_attention.kernels.masked.geometry import FunctionRule, Geometry
from quorum_attention.kernels.protocol import Indices, TaskTensors
from quorum_attention.kernels.torch_private import capturing, no_torch_modes

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
"""Parts of rectangles, (k, 5): lane, query_start, query_stop, key_start, key_stop. What is cut is
cut at multiples of BLOCK, counted from the first query and the first key of a region."""


def classify(
    task: Task, region: Rectangle, rectangles: Sequence[Rectangle], geometry: Geometry
) -> dict[int, Nodes]:
    """The FULL, the PARTIAL and the UNKNOWN nodes; all other blocks are EMPTY.

    Where the functions of the geometry that say nothing of blocks decide, and where they might
    empty a block that is partial anyway, it is UNKNOWN.

    Args:
        region: queries and keys of the task, whose first ones nodes and rectangles count from.
        rectangles: disjoint; the geometry has their causal rule.
    """
    tokens = np.concatenate([np.arange(first, last) for first, last, _ in task.runs])
    queries, keys = tokens[region.query_start :], tokens[region.key_start :]
    known = tuple(rule for rule in geometry.rules if not isinstance(rule, FunctionRule))
    opaque, geometry = len(known) < len(geometry.rules), replace(geometry, rules=known)
    evaluated = opaque or bool(geometry.functions)
    found: dict[int, list[Nodes]] = {FULL: [], PARTIAL: [], UNKNOWN: []}
    nodes = np.array(
        [(0, r.query_start, r.query_stop, r.key_start, r.key_stop) for r in rectangles], np.int64
    ).reshape(-1, 5)
    nodes = some(nodes)
    while len(nodes):
        if evaluated and len(nodes) > MOST_NODES:
            found[UNKNOWN].append(nodes)
            break
        _, q0, q1, k0, k1 = nodes.T
        # Between the first and the last position there may be others' tokens.
        ends = (queries[q0], queries[q1 - 1] + 1, keys[k0], keys[k1 - 1] + 1)
        blocks = zip(*(end.tolist() for end in ends), strict=True)
        codes = np.array([geometry.verdict(Ranges.of(*block)) for block in blocks], np.int8)
        single = (_blocks_along(nodes) == 1).all(axis=1)
        if evaluated:
            codes[(opaque & (codes == FULL)) | (single & (codes == PARTIAL))] = UNKNOWN
        is_cut = ~single & (codes == PARTIAL)
        for code, parts in found.items():
            parts.append(nodes[(codes == code) & ~is_cut])
        nodes = _quarters(nodes[is_cut])
    return {code: joined(parts) for code, parts in found.items()}


@no_torch_modes()
def listed_blocks(
    geometry: Geometry,
    task: TaskTensors,
    region: Rectangle,
    rectangles: Sequence[Rectangle],
    nbytes: int,
    *,
    by_lane: bool = False,
) -> tuple[Nodes, Nodes, tuple[int, int]]:
    """(FULL nodes, PARTIAL nodes, lanes); see ``classify``.

    Args:
        nbytes: for evaluating functions.
        by_lane: whether entries and heads in which a function differs have blocks of their own
            (of a geometry that is no more than a function); otherwise these are PARTIAL for all.
    """
    found = classify(task.task, region, rectangles, geometry)
    full, partial, unknown = [found[FULL]], [found[PARTIAL]], _single_blocks(found[UNKNOWN])
    if not len(unknown):
        return full[0], partial[0], (1, 1)
    evaluator = BlockEvaluator(geometry, task, region)
    codes = evaluator.codes(unknown[:, 1::2].T // BLOCK, nbytes).reshape(len(unknown), -1)
    lanes = evaluator.lanes
    if not by_lane:
        same = (codes == codes[:, :1]).all(axis=1)
        lanes, codes = (1, 1), np.where(same, codes[:, 0], PARTIAL)[:, None]
    for code, nodes in ((FULL, full), (PARTIAL, partial)):
        number, lane = np.nonzero(codes == code)
        nodes.append(np.concatenate([lane[:, None], unknown[number, 1:]], axis=1))
    return joined(full), joined(partial), lanes


def whole_region(task: TaskTensors) -> Rectangle:
    """All queries and keys of a task."""
    return Rectangle(0, task.query.shape[2], 0, task.key.shape[2])


def sides(region: Rectangle) -> tuple[tuple[int, int], tuple[int, int]]:
    """The bounds of its queries and of its keys."""
    return (region.query_start, region.query_stop), (region.key_start, region.key_stop)


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
    """Evaluates which pairs of blocks of a region a geometry keeps, on the task's device. Of blocks
    that rectangles hold in part, all pairs are."""

    def __init__(self, geometry: Geometry, task: TaskTensors, region: Rectangle) -> None:
        at, (entries, heads) = task.indices(region), geometry.depends(task.query.device)
        self._geometry = geometry
        self._entries = at.entries if entries else at.entries[:1]
        self._heads = at.heads if heads else at.heads[:1]
        self._queries, self._keys = _padded(at.queries), _padded(at.keys)

    @property
    def lanes(self) -> tuple[int, int]:
        """(entries, heads) for which blocks are evaluated."""
        return len(self._entries), len(self._heads)

    @no_torch_modes()
    def codes(self, blocks: Ints, nbytes: int) -> Codes:
        """FULL, PARTIAL or EMPTY, (blocks, entries, heads).

        Args:
            blocks: (2, blocks), their rows and columns.
            nbytes: for evaluating them.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        if capturing(self._queries.device):
            raise RuntimeError(
                "a mask's function has to be evaluated before a CUDA graph is captured: make one "
                "such call first, as warm-up"
            )
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

        def of_block(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            found = self._geometry.keeps(Indices(self._entries, self._heads, queries, keys))
            return found.expand(*found.shape[:-4], *self.lanes, BLOCK, BLOCK).contiguous()

        # Our own rules take blocks as they are.
        mapped = torch.vmap(of_block) if self._geometry.functions else of_block
        kept: torch.Tensor = mapped(self._queries[rows], self._keys[columns])
        return kept


def joined_along_rows(nodes: Nodes) -> Nodes:
    """Single blocks of one lane and one rectangle, neighbours in a row joined."""
    nodes = nodes[np.lexsort((nodes[:, 3], nodes[:, 1]))]
    beside = (nodes[1:, 1] == nodes[:-1, 1]) & (nodes[1:, 3] == nodes[:-1, 4])
    first, last = np.ones((2, len(nodes)), dtype=bool)
    first[1:], last[:-1] = ~beside, ~beside
    return np.concatenate([nodes[first, :4], nodes[last, 4:]], axis=1)


def some(nodes: Nodes) -> Nodes:
    """The nodes that hold a pair."""
    return nodes[(nodes[:, 1] < nodes[:, 2]) & (nodes[:, 3] < nodes[:, 4])]


def joined(parts: list[Nodes]) -> Nodes:
    """All nodes of ``parts``, which may be empty."""
    return np.concatenate([np.zeros((0, 5), dtype=np.int64), *parts])


def _blocks_along(nodes: Nodes) -> Ints:
    """(k, 2): how many rows and how many columns of blocks each node touches."""
    return -(-nodes[:, 2::2] // BLOCK) - nodes[:, 1::2] // BLOCK


def _single_blocks(nodes: Nodes) -> Nodes:
    """The parts of nodes in each block, one after the other."""
    rows, columns = _blocks_along(nodes).T
    node = np.repeat(np.arange(len(nodes)), rows * columns)
    row, column = np.divmod(_ranges(np.zeros_like(rows), rows * columns), columns[node])
    lane, q0, q1, k0, k1 = nodes[node].T
    top, left = (row + q0 // BLOCK) * BLOCK, (column + k0 // BLOCK) * BLOCK
    q0, q1 = np.maximum(top, q0), np.minimum(top + BLOCK, q1)
    k0, k1 = np.maximum(left, k0), np.minimum(left + BLOCK, k1)
    return np.stack([lane, q0, q1, k0, k1], axis=1)


def _quarters(nodes: Nodes) -> Nodes:
    lane, q0, q1, k0, k1 = nodes.T
    # Beyond the first block: what touches several is cut.
    middle, centre = ((nodes[:, 1::2] // BLOCK + (_blocks_along(nodes) + 1) // 2) * BLOCK).T
    middle, centre = np.minimum(middle, q1), np.minimum(centre, k1)
    parts = [
        np.stack([lane, a, b, c, d], axis=1)
        for a, b in ((q0, middle), (middle, q1))
        for c, d in ((k0, centre), (centre, k1))
    ]
    return some(joined(parts))


def _padded(tokens: torch.Tensor) -> torch.Tensor:
    """``tokens`` (n,) by blocks, (blocks, 128), the last of them repeated up to a whole one."""
    missing = -len(tokens) % BLOCK
    return torch.cat([tokens, tokens[-1:].expand(missing)]).view(-1, BLOCK)


# FlexAttention's lists of FULL and PARTIAL blocks of a region. It runs the listed blocks, and
# applies the mask in partial ones only.


def block_lists(
    region: Rectangle,
    full: Nodes,
    partial: Nodes,
    lanes: tuple[int, int] = (1, 1),
    pinned: bool = False,
) -> list[torch.Tensor]:
    """A region's block lists, of nodes with no block in common, int32 on the host; none where
    nothing is kept.

    They are counts and indices of partial blocks by query, of full blocks by query, then both by
    key.

    Args:
        region: see ``classify``.
        full, partial: the nodes (``listed_blocks``). A full block that reaches beyond the last
            query or key is listed as partial, because FlexAttention expects that.
        lanes: number of batch entries and of heads that have lists of their own
            (lane = entry * heads + head).
        pinned: whether they are in page-locked memory.
    """
    full, edge = _without_edge(full)
    partial = joined([partial, edge])
    if not len(full) + len(partial):
        return []
    heights, widths = slice(1, 3), slice(3, 5)
    arrays: list[NDArray[Any]] = []
    grid = ceil_div(region.n_queries, BLOCK), ceil_div(region.n_keys, BLOCK)
    for size, along, across in zip(grid, (heights, widths), (widths, heights), strict=True):
        lines = size * math.prod(lanes)
        kinds = [
            _listed(nodes[:, 0] * size, _in_blocks(nodes[:, along]), _in_blocks(nodes[:, across]),
                    lines)
            for nodes in (partial, full)
        ]  # fmt: skip
        # All tables have the width of the longest line, because torch's kernel uses the row stride
        # of the first for both; and at least 2: torch.compile specialises code to sizes of 1.
        width = max(2, *(int(counts.max(initial=0)) for counts, _ in kinds))
        for counts, entries in kinds:
            table = np.zeros((lines, width), dtype=np.int32)
            table[np.arange(width) < counts[:, None]] = entries
            arrays += [counts.reshape(*lanes, size), table.reshape(*lanes, size, width)]
    with no_torch_modes():  # because they are cached
        lists = [torch.from_numpy(array.astype(np.int32)) for array in arrays]
        return [each.pin_memory() for each in lists] if pinned else lists


def _without_edge(nodes: Nodes) -> tuple[Nodes, Nodes]:
    """Whole blocks of ``nodes``, which begin at blocks, and those that end within one."""
    lane, q0, q1, k0, k1 = nodes.T
    low, far = q1 // BLOCK * BLOCK, k1 // BLOCK * BLOCK
    inner = np.stack([lane, q0, low, k0, far], axis=1)
    below, beside = (
        np.stack(sides, axis=1) for sides in ((lane, low, q1, k0, k1), (lane, q0, low, far, k1))
    )
    return some(inner), some(joined([below, beside]))


def _in_blocks(bounds: Ints) -> Ints:
    return np.stack([bounds[:, 0] // BLOCK, -(-bounds[:, 1] // BLOCK)], axis=1)


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
