"""Nodes of the quadtree over the blocks of a task: rectangles of pairs, as rows of an
array."""

from __future__ import annotations

from itertools import product
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
    none = np.zeros((0, 5), dtype=np.int64)
    return np.concatenate([none, *parts])


def sides_of(nodes: Nodes) -> tuple[Ints, Ints]:
    """The starts and the stops of nodes, of queries and of keys, (k, 2) each; views."""
    return nodes[:, 1::2], nodes[:, 2::2]


def with_sides(nodes: Nodes, starts: Ints, stops: Ints) -> Nodes:
    """The nodes with other starts and stops (``sides_of``)."""
    changed: Nodes = nodes.copy()
    changed[:, 1::2] = starts
    changed[:, 2::2] = stops
    return changed


def without_empty(nodes: Nodes) -> Nodes:
    """The nodes that hold a pair."""
    starts, stops = sides_of(nodes)
    with_pairs: Nodes = nodes[(starts < stops).all(axis=1)]
    return with_pairs


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


def blocks_along(nodes: Nodes) -> Ints:
    """How many rows and how many columns of blocks each node touches, (k, 2)."""
    starts, stops = sides_of(nodes)
    last: Ints = -(-stops // BLOCK)
    return last - starts // BLOCK


def single_blocks(nodes: Nodes) -> Nodes:
    """The parts of nodes in each block, one after the other."""
    sides = blocks_along(nodes)
    counts = sides.prod(axis=1)
    node = np.repeat(np.arange(len(nodes)), counts)
    number = consecutive(np.zeros_like(counts), counts)
    blocks = np.stack(np.divmod(number, sides[node, 1]), axis=1)
    parts = nodes[node]
    starts, stops = sides_of(parts)
    firsts = (blocks + starts // BLOCK) * BLOCK
    np.maximum(firsts, starts, out=starts)
    np.minimum(firsts + BLOCK, stops, out=stops)
    return parts


def quarters(nodes: Nodes) -> Nodes:
    """Four parts of each node, without the empty ones."""
    starts, stops = sides_of(nodes)
    # Beyond the first block: what touches several is cut.
    blocks_before = starts // BLOCK + (blocks_along(nodes) + 1) // 2
    middles = np.minimum(blocks_before * BLOCK, stops)
    parts = []
    # Before or after the middle: of queries, and of keys.
    for is_after in product((False, True), repeat=2):
        part_starts = np.where(is_after, middles, starts)
        part_stops = np.where(is_after, stops, middles)
        parts.append(with_sides(nodes, part_starts, part_stops))
    return without_empty(joined(parts))


def begins_runs(*numbers: Ints) -> NDArray[np.bool_]:
    """Where runs of equal numbers begin, along the last dimension of each of
    ``numbers``: at the first place, and where one of them changes."""
    begins = np.ones(numbers[0].shape, np.bool_)
    begins[..., 1:] = False
    for ids in numbers:
        begins[..., 1:] |= ids[..., 1:] != ids[..., :-1]
    return begins


def consecutive(starts: Ints, lengths: Ints) -> NDArray[Any]:
    """``start``, ``start + 1``, ... of every range, one after the other."""
    before = np.cumsum(lengths) - lengths
    numbers = np.repeat((starts - before).astype(np.int32), lengths)
    numbers += np.arange(len(numbers), dtype=np.int32)
    return numbers
