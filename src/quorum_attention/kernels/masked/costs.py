"""What the ways to run a mask of tokens cost: by blocks, by packed calls, or with a
bias.

Costs are in pairs of a query and a key of one head, as far as the device computes them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.block_nodes import begins_runs
from quorum_attention.kernels.masked.token_rules import Ids

# Pairs of one head that take as long as a kernel call takes the host: of a call of
# blocks, whose results are merged, and of a packed one.
_BLOCK_CALL = 1 << 16
_PACKED_CALL = 1 << 14
# The same on a GPU (an H200's): 2**26 pairs take about a third of a millisecond in both
# passes. For blocks and packed calls the host makes tables of tokens, and copies them
# to the device.
_DEVICE_BLOCK_CALL = 1 << 27
_DEVICE_PACKED_CALL = 1 << 29
_DEVICE_BIAS_CALL = 1 << 26
# Pairs of one head that take as long as a row's copies.
_PAIRS_OF_A_ROW = 16
# Finding the blocks of a mask that is tested pair by pair takes as long as so many
# calls.
_CALLS_OF_A_TEST = 64
# Runs of a document above which its blocks are short.
_MANY_RUNS = 8


class BlockCounts(NamedTuple):
    """The blocks of neighbouring tokens of a mask, about.

    Attributes:
        n_calls: of kernels.
        pairs: of one head, rows that are merged among them.
    """

    n_calls: int
    pairs: int


def blocks_of(by_query: Ids, by_key: Ids, shape: CallShape) -> BlockCounts:
    """About what blocks of neighbouring tokens take.

    Args:
        by_query, by_key: ids, (1 or batch, n); of keys ``NO_KEY`` in those that no
            query keeps.
    """
    query_runs = _count_runs(by_query)
    key_runs = _count_runs(by_key)
    names = _count_names(by_query)
    many_runs = _MANY_RUNS * names
    # Runs that meet many others are no blocks, but tested pair by pair.
    n_meetings = query_runs * key_runs
    is_tested = n_meetings > many_runs * (query_runs + key_runs)
    n_blocks = np.maximum(query_runs, key_runs)
    if shape.device_type != "cpu":
        # There one launch takes all blocks, but short ones are as slow as tests.
        is_tested |= n_blocks > many_runs
        n_blocks = np.ones_like(n_blocks)
    calls = np.where(is_tested, _CALLS_OF_A_TEST, n_blocks)
    area = shape.n_queries * shape.n_keys
    merges_of_row = np.maximum(1, key_runs // names)
    merged = shape.n_queries * merges_of_row * _PAIRS_OF_A_ROW
    pairs = np.where(is_tested, area, area // names + merged)

    begins_calls = _differs_from_before(by_query, by_key)
    n_entries = len(begins_calls)
    calls_by_entry = np.broadcast_to(calls, n_entries)
    pairs_by_entry = np.broadcast_to(pairs, n_entries)
    n_repeats = shape.batch // n_entries
    return BlockCounts(
        n_calls=int(calls_by_entry[begins_calls].sum()),
        pairs=int(pairs_by_entry.sum()) * n_repeats,
    )


def _differs_from_before(by_query: Ids, by_key: Ids) -> NDArray[np.bool_]:
    """Which entries have other ids than the entry before, (batch or 1,). Those of equal
    ids are computed together."""
    n_entries = max(len(by_query), len(by_key))
    differs = np.zeros(n_entries, np.bool_)
    differs[0] = True
    for ids in (by_query, by_key):
        if len(ids) > 1:
            is_changed = ids[1:] != ids[:-1]
            differs[1:] |= is_changed.any(axis=1)
    return differs


def cost_of_blocks(blocks: BlockCounts, shape: CallShape) -> int:
    """The cost of blocks."""
    call = _BLOCK_CALL if shape.device_type == "cpu" else _DEVICE_BLOCK_CALL
    return blocks.n_calls * call + blocks.pairs * shape.heads


def cost_of_packed_calls(n_calls: int, pairs: int, shape: CallShape) -> int:
    """The cost of packed calls that compute so many pairs of one head."""
    call = _PACKED_CALL if shape.device_type == "cpu" else _DEVICE_PACKED_CALL
    n_rows = shape.batch * (shape.n_queries + shape.n_keys)
    pairs_of_a_head = pairs + n_rows * _PAIRS_OF_A_ROW
    return n_calls * call + pairs_of_a_head * shape.heads


def cost_of_bias(n_calls: int, n_pairs: int) -> int:
    """The cost of calls with a bias, which compute all pairs of all heads."""
    return n_calls * _DEVICE_BIAS_CALL + n_pairs


def _count_runs(ids: Ids) -> Ids:
    """Runs of equal numbers in each row, (rows,)."""
    counts: Ids = begins_runs(ids).sum(axis=1)
    return counts


def _count_names(ids: Ids) -> Ids:
    """Distinct numbers in each row, (rows,)."""
    return _count_runs(np.sort(ids, axis=1))
