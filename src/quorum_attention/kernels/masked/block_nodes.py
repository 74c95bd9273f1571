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
    def of_nodes(cls, nodes: Nodes) -> NodeColumns:
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
    at = NodeColumns.of_nodes(nodes)
    has_queries = at.query_start < at.query_stop
    has_keys = at.key_start < at.key_stop
    return nodes[has_queries & has_keys]


def joined_along_rows(nodes: Nodes) -> Nodes:
    """Single blocks of one lane and one rectangle, neighbours in a row joined."""
    columns = NodeColumns.of_nodes(nodes)
    order = np.lexsort((columns.key_start, columns.query_start))
    blocks = nodes[order]
    before = NodeColumns.of_nodes(blocks[:-1])
    after = NodeColumns.of_nodes(blocks[1:])
    is_same_row = before.query_start == after.query_start
    touches = before.key_stop == after.key_start
    is_apart = ~(is_same_row & touches)
    begins_run = np.ones(len(blocks), dtype=bool)
    begins_run[1:] = is_apart
    ends_run = np.ones(len(blocks), dtype=bool)
    ends_run[:-1] = is_apart
    first_blocks = NodeColumns.of_nodes(blocks[begins_run])
    last_blocks = NodeColumns.of_nodes(blocks[ends_run])
    return first_blocks.nodes(key_stop=last_blocks.key_stop)


def blocks_along(nodes: Nodes) -> tuple[Ints, Ints]:
    """How many rows and how many columns of blocks each node touches, (k,) each."""
    at = NodeColumns.of_nodes(nodes)
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
    at = NodeColumns.of_nodes(nodes[node])
    first_query = (row + at.query_start // BLOCK) * BLOCK
    first_key = (column + at.key_start // BLOCK) * BLOCK
    return at.nodes(
        query_start=np.maximum(first_query, at.query_start),
        query_stop=np.minimum(first_query + BLOCK, at.query_stop),
        key_start=np.maximum(first_key, at.key_start),
        key_stop=np.minimum(first_key + BLOCK, at.key_stop),
    )


def quarters(nodes: Nodes) -> Nodes:
    """Four parts of each node, without the empty ones."""
    at = NodeColumns.of_nodes(nodes)
    rows, columns = blocks_along(nodes)
    # Beyond the first block: what touches several is cut.
    middle = np.minimum(
        (at.query_start // BLOCK + (rows + 1) // 2) * BLOCK, at.query_stop
    )
    centre = np.minimum(
        (at.key_start // BLOCK + (columns + 1) // 2) * BLOCK, at.key_stop
    )
    upper = NodeColumns.of_nodes(at.nodes(query_stop=middle))
    lower = NodeColumns.of_nodes(at.nodes(query_start=middle))
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
