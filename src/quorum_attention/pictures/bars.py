"""Horizontal bars with a label above and a note below each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from quorum_attention.pictures.figures import INK, PAPER, SOFT, Colour, remove_frame

# Room of fewer bars is as high as that of three.
_LEAST_ROWS = 3
_BAR_HEIGHT = 0.34
_LABEL_OFFSET = -0.31
_NOTE_OFFSET = 0.29
_MARGIN = 1.02
_LEAST_LENGTH = 1e-9


class Bar(NamedTuple):
    """A bar with its texts."""

    label: str
    length: float
    colour: Colour | str
    note: str = ""


def draw_bars(axes: Any, bars: Sequence[Bar], least_length: float = 0.0) -> None:
    """Draw bars from top to bottom.

    Args:
        least_length: a length that fits into ``axes`` although no bar may have it.
    """
    remove_frame(axes)
    lengths = [bar.length for bar in bars]
    longest = max(least_length, _LEAST_LENGTH, *lengths)
    n_rows = max(_LEAST_ROWS, len(bars))
    axes.set_xlim(0, longest * _MARGIN)
    axes.set_ylim(n_rows - 0.4, -0.6)
    for place, bar in enumerate(bars):
        axes.barh(
            place,
            bar.length,
            height=_BAR_HEIGHT,
            color=[bar.colour],
            zorder=2,
        )
        _write(
            axes,
            place + _LABEL_OFFSET,
            bar.label,
            INK,
            10.5,
        )
        _write(
            axes,
            place + _NOTE_OFFSET,
            bar.note,
            SOFT,
            9.5,
        )


def _write(axes: Any, y: float, text: str, ink: str, points: float) -> None:
    background = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
    axes.text(
        0, y, text, color=ink, size=points, va="center", zorder=4, bbox=background
    )
