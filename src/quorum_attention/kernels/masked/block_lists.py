"""FlexAttention's lists of FULL and PARTIAL blocks of a region.

It runs the listed blocks, and applies the mask in partial ones only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.masked.block_nodes import (
    BLOCK,
    Ints,
    NodeColumns,
    Nodes,
    consecutive,
    joined,
    without_empty,
)
from quorum_attention.kernels.torch_private import no_torch_modes

# torch.compile specialises code to sizes of 1.
_MIN_WIDTH = 2


def block_lists(
    region: Rectangle,
    full: Nodes,
    partial: Nodes,
    lanes: tuple[int, int] = (1, 1),
    pinned: bool = False,
) -> list[torch.Tensor]:
    """A region's block lists, of nodes with no block in common, int32 on the host; none
    where nothing is kept.

    They are counts and indices of partial blocks by query, of full blocks by query,
    then both by key.

    Args:
        region: see ``classify``.
        full, partial: the nodes (``listed_blocks``). A full block that reaches beyond
            the last query or key is listed as partial, because FlexAttention expects
            that.
        lanes: number of batch entries and of heads that have lists of their own
            (lane = entry * heads + head).
        pinned: whether they are in page-locked memory.
    """
    inner, edge = _split_at_edge(full)
    partial = joined([partial, edge])
    if len(inner) + len(partial) == 0:
        return []
    n_rows = ceil_div(region.n_queries, BLOCK)
    n_columns = ceil_div(region.n_keys, BLOCK)
    by_query = []
    by_key = []
    for nodes in (partial, inner):
        by_query.append(_lists_by_query(nodes, n_rows, lanes))
        by_key.append(_lists_by_query(_transposed(nodes), n_columns, lanes))
    arrays = [
        *_tables(by_query, n_rows, lanes),
        *_tables(by_key, n_columns, lanes),
    ]
    with no_torch_modes():  # because they are cached
        lists = [torch.from_numpy(array) for array in arrays]
        if pinned:
            return [tensor.pin_memory() for tensor in lists]
        return lists


def _split_at_edge(nodes: Nodes) -> tuple[Nodes, Nodes]:
    """Whole blocks of ``nodes``, which begin at blocks, and those that end within
    one."""
    at = NodeColumns.of_nodes(nodes)
    bottom = at.query_stop // BLOCK * BLOCK
    right = at.key_stop // BLOCK * BLOCK
    inner = at.nodes(query_stop=bottom, key_stop=right)
    below = at.nodes(query_start=bottom)
    at_right = at.nodes(query_stop=bottom, key_start=right)
    edge = joined([below, at_right])
    return without_empty(inner), without_empty(edge)


def _transposed(nodes: Nodes) -> Nodes:
    """Nodes with queries and keys swapped."""
    return nodes[:, [0, 3, 4, 1, 2]]


class _Lists(NamedTuple):
    """The blocks that each line lists.

    Attributes:
        counts: how many, (lines,).
        indices: of the blocks, line after line, ascending.
    """

    counts: NDArray[np.int32]
    indices: NDArray[np.int32]


def _lists_by_query(nodes: Nodes, n_rows: int, lanes: tuple[int, int]) -> _Lists:
    """The blocks of keys that each row of blocks lists, lane after lane."""
    at = NodeColumns.of_nodes(nodes)
    first_row = at.query_start // BLOCK
    first_line = at.lane * n_rows + first_row
    first_column = at.key_start // BLOCK
    last_column = _ceil_blocks(at.key_stop)
    heights = _ceil_blocks(at.query_stop) - first_row
    # One part of each node in each of its lines.
    lines = consecutive(first_line, heights)
    starts = np.repeat(first_column, heights)
    widths = np.repeat(last_column - first_column, heights)
    order = np.lexsort((starts, lines))
    lines = lines[order]
    starts = starts[order]
    widths = widths[order]
    n_lines = n_rows * math.prod(lanes)
    counts = np.bincount(lines, weights=widths, minlength=n_lines)
    indices = consecutive(starts, widths)
    return _Lists(
        counts.astype(np.int32),
        indices.astype(np.int32, copy=False),
    )


def _ceil_blocks(stops: Ints) -> Ints:
    """Blocks up to a token."""
    blocks: Ints = -(-stops // BLOCK)
    return blocks


def _tables(
    kinds: list[_Lists], n_rows: int, lanes: tuple[int, int]
) -> list[NDArray[np.int32]]:
    """The counts (*lanes, rows) and the indices (*lanes, rows, width) of each kind."""
    # All tables have the width of the longest line, because torch's kernel uses the row
    # stride of the first for both.
    width = _MIN_WIDTH
    for lists in kinds:
        width = max(width, int(lists.counts.max(initial=0)))
    arrays: list[NDArray[np.int32]] = []
    for lists in kinds:
        table = np.zeros((len(lists.counts), width), dtype=np.int32)
        is_listed = np.arange(width) < lists.counts[:, None]
        table[is_listed] = lists.indices
        arrays.append(lists.counts.reshape(*lanes, n_rows))
        arrays.append(table.reshape(*lanes, n_rows, width))
    return arrays
