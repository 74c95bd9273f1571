"""The units of a pass: whole heads, or cyclic quorum tasks of a head's chunks, and
their merges.

A task has ``l`` of the ``c`` chunks of a sequence, and every pair of chunks meets in
one task. So a task loads ``l / c`` of the rows and leaves a partial state of each of
its chunks: statistics or gradients. A chunk is merged when the states of the ``l``
tasks that hold the chunk exist.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.quorums import (
    chunk_count,
    quorum_size,
    quorum_sizes,
)

# Units for each worker, at least: the last unit to end, or a lost one, costs no more.
_MIN_UNITS_PER_WORKER = 10
# A head whose results are larger than this is cut: a worker has the results of whole
# heads in host memory before it writes them.
_MAX_HEAD_BYTES = 1 << 30
# Chunks have this many tokens at least: the states of shorter ones take longer than
# their pairs.
_MIN_CHUNK_TOKENS = 256
_MAX_QUORUM_SIZE = 14
# Chunks end at a tile where each has at least so many tiles.
_TILE = 128
_MIN_TILES = 8

Head = tuple[int, int]
"""A batch entry and a key/value head of it."""


class FarmUnit(NamedTuple):
    """The work of one Ray task, for a key/value head and the query heads that share it.

    Attributes:
        kind: "head": the whole head; "task": partial states of the chunks of a quorum
            task; "merge": the result of one chunk, from all its partial states.
        entry, head: batch entry and key/value head.
        number: of the task or the chunk.
    """

    kind: Literal["head", "task", "merge"]
    entry: int
    head: int
    number: int = 0


def rows_of_chunk(shape: CallShape, chunk: int, n_chunks: int, n_rows: int) -> Interval:
    """Return the rows of a chunk, of ``n_rows`` queries or keys.

    Chunks are equal, up to a tile where tiles are small beside them.
    """
    # A causal rule compares positions, so chunks of queries and keys begin at the same
    # ones.
    n_positions = shape.n_tokens if shape.is_causal else n_rows
    tile = 1
    if n_positions >= _MIN_TILES * n_chunks * _TILE:
        tile = _TILE
    tile_of_all = n_chunks * tile
    start = n_positions * chunk // tile_of_all * tile
    stop = n_positions * (chunk + 1) // tile_of_all * tile
    if chunk + 1 == n_chunks:
        stop = n_rows
    return Interval(
        min(start, n_rows),
        min(stop, n_rows),
    )


def choose_n_chunks(
    shape: CallShape,
    n_heads: int,
    n_workers: int,
    head_bytes: int,
    n_chunks: int | None,
) -> int:
    """Return into how many chunks each head is cut; 1: heads stay whole.

    Args:
        n_heads: key/value heads that are computed, of all batch entries.
        head_bytes: of the results of one key/value head.
        n_chunks: the caller's choice. None: heads are cut where there are fewer than
            ten units for each worker, or where one has too many bytes; with dropout
            never.

    Raises:
        ValueError: there is no interest set of so many chunks, or heads may not be cut.
    """
    if n_chunks is None:
        return _fewest_chunks(shape, n_heads, n_workers, head_bytes)
    quorum_size(n_chunks)
    if n_chunks > 1 and shape.dropout:
        raise ValueError(f"chunks must be 1 for a call with dropout_p, got {n_chunks}")
    return n_chunks


def _fewest_chunks(
    shape: CallShape, n_heads: int, n_workers: int, head_bytes: int
) -> int:
    """Return the fewest chunks of which none is too large, with enough units for all
    workers.

    Where there are none, heads are cut as far as is worth it.
    """
    most_chunks = min(shape.n_queries, shape.n_keys) // _MIN_CHUNK_TOKENS
    if shape.dropout:
        most_chunks = 0
    # Three chunks in three tasks of two: as many rows as two heads, so no cut is worth
    # less.
    sizes = [
        n
        for n in map(chunk_count, quorum_sizes(_MAX_QUORUM_SIZE))
        if 3 < n <= most_chunks
    ]
    choices = [1, *sizes]
    for n_chunks in choices:
        is_small = quorum_size(n_chunks) * head_bytes <= n_chunks * _MAX_HEAD_BYTES
        if is_small and n_heads * n_chunks >= _MIN_UNITS_PER_WORKER * n_workers:
            return n_chunks
    return choices[-1]
