"""Figures that do not use pyplot and its global state."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from colorsys import hls_to_rgb
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from quorum_attention.writing import check_target, replacing

INK = "#22262b"
# On coloured areas: stays dark where a page turns INK to its own colour (coverage_svg).
ON_COLOUR = "#22262c"
SOFT = "#6b7280"
PAPER = "#ffffff"
MASKED = "#e6e8eb"
Colour = tuple[float, float, float]
# What matplotlib's settings of figures begin with; others are of windows, files and time zones.
_OF_FIGURES = (
    "axes.", "figure.", "font.", "hatch.", "legend.", "lines.", "markers.", "mathtext.", "patch.",
    "path.", "savefig.", "svg.", "text.", "xaxis.", "xtick.", "yaxis.", "ytick.",
)  # fmt: skip


@contextmanager
def own_style() -> Iterator[None]:
    """A block, or a decorated function, whose figures look the same whatever style the program has:
    one may ask for LaTeX, which is not everywhere and reads "%" and "_" otherwise."""
    try:
        import matplotlib
    except ImportError:  # which ``new_figure`` explains
        yield
        return
    usual = {n: v for n, v in matplotlib.rcParamsDefault.items() if n.startswith(_OF_FIGURES)}
    with matplotlib.rc_context(usual):
        yield


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that many inches on an Agg canvas.

    Raises:
        ImportError: matplotlib is not installed; says how to install it.
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
    """Check, before anything is computed, that a picture can be written; returns its file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: its ending is no picture format.
    """
    _format(new_figure(1, 1), path)
    return check_target(path)


def _format(figure: Any, path: str | PathLike[str]) -> str:
    """The picture format by the ending of ``path``; PNG without an ending."""
    ending = os.path.splitext(path)[1].removeprefix(".").lower() or "png"
    known = figure.canvas.get_supported_filetypes()
    if ending not in known:
        raise ValueError(
            f"{os.fspath(path)!r} must end in one of {', '.join(sorted(known))}, for the picture's "
            f"format"
        )
    return ending


def save(figure: Any, path: str | PathLike[str], dpi: int = 150) -> None:
    """Write ``figure``, completely or not at all; the ending of ``path`` is the format (.png, .svg,
    .pdf)."""
    kind = _format(figure, path)
    with replacing(path) as file:
        figure.savefig(file, format=kind, dpi=dpi, facecolor=PAPER)


def bare(axes: Any) -> None:
    """Remove the frame and the ticks."""
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def headed(axes: Any, title: str, note: str = "") -> None:
    """Write a title and a note over the top left corner of ``axes``."""
    for points, text, size, colour, weight in (
        (30, title, 12, INK, "bold"), (13, note, 10, SOFT, "normal")
    ):  # fmt: skip
        axes.annotate(
            text, (0, 1), (0, points), xycoords="axes fraction", textcoords="offset points",
            size=size, color=colour, weight=weight,
        )  # fmt: skip


def explain(figure: Any, left: float, top: float, columns: int, text: str) -> None:
    """Write what a picture shows, for someone who sees one for the first time: ``text`` in lines of
    so many characters, from ``left`` and ``top`` (shares of the figure) on downwards."""
    figure.text(
        left, top, textwrap.fill(text, columns), color=SOFT, size=9.5, va="top", linespacing=1.45
    )


def hue(turn: float, lightness: float = 0.67) -> Colour:
    """A colour by its place on a circle, from 0 to 1."""
    return hls_to_rgb((turn + 0.07) % 1.0, lightness, 0.62)
