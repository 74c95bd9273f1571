"""The values of the routes' fields that a search tries."""

from __future__ import annotations

from dataclasses import dataclass

from quorum_attention.decomposition.pieces import Pieces
from quorum_attention.execution.device.residency import Home
from quorum_attention.execution.trimming import Tally


@dataclass(frozen=True, slots=True)
class Choice:
    """Values to try for the fields of routes; a search tries the first ones first.

    Attributes:
        n_caps: numbers of slots.
        homes: where the travelling state may live.
        streams: numbers of kernel calls in flight at once.
        trimmed: sizes of the trimmed tasks; None: they are not trimmed.
        pieces: layouts of the rectangles of all tasks together.
    """

    n_caps: tuple[int, ...]
    homes: tuple[Home, ...]
    streams: tuple[int, ...]
    trimmed: Tally | None = None
    pieces: tuple[Pieces, ...] = ("halves",)
