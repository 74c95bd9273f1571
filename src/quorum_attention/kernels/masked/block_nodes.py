"""Nodes of the quadtree over the blocks of a task: rectangles of pairs, as rows of an
array."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 128
"""The queries, and the keys, of a block."""

Ints = NDArray[np.int64]
Nodes = Ints
"""Parts of rectangles, (k, 5): lane, query_start, query_stop, key_start, key_stop. What
is cut is cut at multiples of BLOCK, counted from the first query and the first key of a
region."""


class NodeColumns(NamedTuple):
    """The columns of nodes, (k,) each."""

    lane: Ints
    query_start: Ints
    query_stop: Ints
    key_start: Ints
    key_stop: Ints

    @classmethod
    def of(cls, nodes: Nodes) -> NodeColumns:
        """The columns of ``nodes``, as views."""
        return cls(*nodes.T)

    def nodes(self, **changes: Ints) -> Nodes:
        """The nodes with these columns, some of them changed."""
        return np.stack(self._replace(**changes), axis=1)


def joined(parts: list[Nodes]) -> Nodes:
    """All nodes of ``parts``, which may be empty."""
    return np.concatenate([np.zeros((0, 5), dtype=np.int64), *parts])


def without_empty(nodes: Nodes) -> Nodes:
    """The nodes that hold a pair."""
    at = NodeColumns.of(nodes)
    has_queries = at.query_start < at.query_stop
    has_keys = at.key_start < at.key_stop
    return nodes[has_queries & has_keys]


def joined_along_rows(nodes: Nodes) -> Nodes:
    """Single blocks of one lane and one rectangle, neighbours in a row joined."""
    at = NodeColumns.of(nodes)
    order = np.lexsort((at.key_start, at.query_start))
    at = NodeColumns.of(nodes[order])
    is_same_row = at.query_start[1:] == at.query_start[:-1]
    follows = is_same_row & (at.key_start[1:] == at.key_stop[:-1])
    begins_run = np.ones(len(nodes), dtype=bool)
    begins_run[1:] = ~follows
    ends_run = np.ones(len(nodes), dtype=bool)
    ends_run[:-1] = ~follows
    first = NodeColumns.of(nodes[order][begins_run])
    return first.nodes(key_stop=at.key_stop[ends_run])


def blocks_along(nodes: Nodes) -> tuple[Ints, Ints]:
    """How many rows and how many columns of blocks each node touches, (k,) each."""
    at = NodeColumns.of(nodes)
    rows = _blocks_within(at.query_start, at.query_stop)
    columns = _blocks_within(at.key_start, at.key_stop)
    return rows, columns


def _blocks_within(starts: Ints, stops: Ints) -> Ints:
    """How many blocks the tokens from ``starts`` to ``stops`` touch."""
    last: Ints = -(-stops // BLOCK)
    return last - starts // BLOCK


def single_blocks(nodes: Nodes) -> Nodes:
    """The parts of nodes in each block, one after the other."""
    rows, columns = blocks_along(nodes)
    counts = rows * columns
    node = np.repeat(np.arange(len(nodes)), counts)
    number = consecutive(np.zeros_like(rows), counts)
    row, column = np.divmod(number, columns[node])
    at = NodeColumns.of(nodes[node])
    top = (row + at.query_start // BLOCK) * BLOCK
    left = (column + at.key_start // BLOCK) * BLOCK
    return at.nodes(
        query_start=np.maximum(top, at.query_start),
        query_stop=np.minimum(top + BLOCK, at.query_stop),
        key_start=np.maximum(left, at.key_start),
        key_stop=np.minimum(left + BLOCK, at.key_stop),
    )


def quarters(nodes: Nodes) -> Nodes:
    """Four parts of each node, without the empty ones."""
    at = NodeColumns.of(nodes)
    rows, columns = blocks_along(nodes)
    # Beyond the first block: what touches several is cut.
    middle = np.minimum(
        (at.query_start // BLOCK + (rows + 1) // 2) * BLOCK, at.query_stop
    )
    centre = np.minimum(
        (at.key_start // BLOCK + (columns + 1) // 2) * BLOCK, at.key_stop
    )
    upper = NodeColumns.of(at.nodes(query_stop=middle))
    lower = NodeColumns.of(at.nodes(query_start=middle))
    parts = [
        upper.nodes(key_stop=centre),
        upper.nodes(key_start=centre),
        lower.nodes(key_stop=centre),
        lower.nodes(key_start=centre),
    ]
    return without_empty(joined(parts))


def consecutive(starts: Ints, lengths: Ints) -> NDArray[Any]:
    """``start``, ``start + 1``, ... of every range, one after the other."""
    before = np.cumsum(lengths) - lengths
    numbers = np.repeat((starts - before).astype(np.int32), lengths)
    numbers += np.arange(len(numbers), dtype=np.int32)
    return numbers
