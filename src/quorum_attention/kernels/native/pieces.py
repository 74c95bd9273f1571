"""Pieces: the pairs that a mask keeps of a task's rectangles, as bands within
bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quorum_attention.decomposition import EMPTY, FULL, Ranges, Rectangle, Rows, Task
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.native.columns import PieceColumn

Ints = NDArray[np.int64]

NO_DIAGONAL = (1 << 31) - 1
"""The ``diagonal`` of a piece that no causal mask cuts; sums with it need 64 bits."""

UNLIMITED = (1 << 31) - 1
"""A side of a window that has no limit; sums with it need 64 bits."""
Window = tuple[int, int]
"""How far before and after a query its keys may be."""
BLOCK_WINDOW: Window = (0, UNLIMITED)
"""The window of a launch whose pieces have windows of their own."""


def pieces_of(rectangles: Sequence[Rectangle], task: Task, geometry: Geometry) -> Ints:
    """The pieces that a mask keeps of rectangles, cut where global positions jump.

    Args:
        rectangles: local positions.
        task: the task whose tokens these are.
        geometry: the kept pairs. If its band has a lower bound, it is a window: its
            bounds are tested by the kernel, not by ``diagonal``. Where blocks have
            windows of their own, a piece's lower bound is in ``distance``, for a window
            that ends at the query (``BLOCK_WINDOW``).

    Returns:
        (n, ``len(PieceColumn)``), disjoint.
    """
    pieces: list[tuple[int, ...]] = []
    # No key is further before its query than this.
    n_positions = task.spans[-1].stop if task.spans else 0
    for rectangle in rectangles:
        for queries, keys, is_causal in task.contiguous(rectangle):
            pieces += _contiguous_pieces(
                queries, keys, is_causal, geometry, n_positions
            )
    table = np.array(pieces, dtype=np.int64)
    return table.reshape(-1, len(PieceColumn))


def _contiguous_pieces(
    queries: Rows, keys: Rows, is_causal: bool, geometry: Geometry, n_positions: int
) -> list[tuple[int, ...]]:
    """The pieces of consecutive queries and keys."""
    shift = queries.start - queries.local
    key_shift = keys.start - keys.local
    distance = shift - key_shift
    tests_window = geometry.band.low is not None and not geometry.has_block_windows
    pieces: list[tuple[int, ...]] = []
    ranges = Ranges.from_bounds(queries.start, queries.stop, keys.start, keys.stop)
    for block, band in geometry.within(ranges):
        high = _upper_edge(band, is_causal, tests_window)
        verdict = Band(None, high).verdict(block)
        if verdict is EMPTY or band.verdict(block) is EMPTY:
            continue
        diagonal = NO_DIAGONAL
        if verdict is not FULL and high is not None:
            diagonal = high + distance
        piece_distance = distance
        if geometry.has_block_windows:
            piece_distance += -n_positions if band.low is None else band.low
        (query_start, query_stop), (key_start, key_stop) = block
        pieces.append(
            (
                query_start - shift,
                query_stop - shift,
                key_start - key_shift,
                key_stop - key_shift,
                diagonal,
                piece_distance,
                0,  # mixed
                shift,
            )
        )
    return pieces


def _upper_edge(band: Band, is_causal: bool, tests_window: bool) -> int | None:
    """How far beyond its query a key of a piece may be; None: anywhere.

    Args:
        tests_window: whether the kernel tests both edges of the band itself.
    """
    if is_causal and (band.high is None or band.high > 0):
        return 0
    return None if tests_window else band.high
