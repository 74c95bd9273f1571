"""A figure of its own, without touching pyplot or its global state."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

INK = "#22262b"
SOFT = "#6b7280"
PAPER = "#ffffff"
MASKED = "#e6e8eb"


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that many inches on an Agg canvas.

    Raises:
        ImportError: matplotlib is not there; says how to get it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'drawing needs matplotlib: pip install "quorum-attention[draw]"'
        ) from error
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | PathLike[str]) -> None:
    """Write ``figure``; the ending of ``path`` says in which format (.png, .svg, .pdf)."""
    figure.savefig(fspath(path), dpi=150, facecolor=PAPER)


def bare(axes: Any) -> None:
    """No frame, no ticks."""
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
