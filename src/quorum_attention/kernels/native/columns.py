"""The columns of a launch's tables, for the host and for Triton."""

from __future__ import annotations

from enum import IntEnum


class PieceColumn(IntEnum):
    """The columns of pieces (``pieces.py``), int64. Bounds are local positions.

    A pair (q, k) belongs to a piece if it is within bounds and ``q - k + diagonal >=
    0``. Its global distance is ``q - k + distance``.

    Attributes:
        QUERY_START, QUERY_STOP, KEY_START, KEY_STOP: the bounds.
        DIAGONAL: see above; ``pieces.NO_DIAGONAL``: no causal mask cuts the piece.
        DISTANCE: see above.
        MIXED: 1 if bits decide about each pair, else 0.
        SHIFT: a query's global position is its local one plus this; where bits decide
            it is where the bits of the block begin (``tiles_triton.kept_by_bits``).
    """

    QUERY_START = 0
    QUERY_STOP = 1
    KEY_START = 2
    KEY_STOP = 3
    DIAGONAL = 4
    DISTANCE = 5
    MIXED = 6
    SHIFT = 7


class EntryColumn(IntEnum):
    """The columns of a table's entries (``runs.py``), int32.

    An entry is a run of rows of the other side, which a block of rows walks. The rows
    from BEGIN to END are whole tiles of kept pairs; the others of the run are ragged.

    Attributes:
        LOW, HIGH: the block's own rows that the run is for.
        START, BEGIN, END, STOP: the rows of the other side.
        DIAGONAL, DISTANCE, MIXED, SHIFT: the columns of the pieces that were joined.
    """

    LOW = 0
    HIGH = 1
    START = 2
    BEGIN = 3
    END = 4
    STOP = 5
    DIAGONAL = 6
    DISTANCE = 7
    MIXED = 8
    SHIFT = 9
