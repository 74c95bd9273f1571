"""A figure of its own, without touching pyplot or its global state."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import Any

from quorum_attention.writing import check_target, replacing

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


def check_drawable(path: str | PathLike[str]) -> Path:
    """The file that a picture at ``path`` will be, before anything is computed for it.

    Raises:
        ImportError: matplotlib is not there.
        OSError: the file cannot be written.
        ValueError: its ending names no format that pictures can have.
    """
    _format(new_figure(1, 1), path)
    return check_target(path)


def _format(figure: Any, path: str | PathLike[str]) -> str:
    """The format that the ending of ``path`` names; PNG where there is none."""
    ending = os.path.splitext(path)[1].removeprefix(".").lower() or "png"
    known = figure.canvas.get_supported_filetypes()
    if ending not in known:
        raise ValueError(
            f"{os.fspath(path)!r} must end in one of {', '.join(sorted(known))}, for the picture's "
            f"format"
        )
    return ending


def save(figure: Any, path: str | PathLike[str], dpi: int = 150) -> None:
    """Write ``figure``, whole or not at all; the ending of ``path`` says in which format (.png,
    .svg, .pdf)."""
    kind = _format(figure, path)
    with replacing(path) as file:
        figure.savefig(file, format=kind, dpi=dpi, facecolor=PAPER)


def bare(axes: Any) -> None:
    """No frame, no ticks."""
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
