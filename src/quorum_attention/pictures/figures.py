"""What all pictures share: their style, their colours, their texts, and how they are
written."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from colorsys import hls_to_rgb
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from quorum_attention.extras import install_hint
from quorum_attention.writing import atomic_write, check_target

INK = "#22262b"
SOFT = "#6b7280"
PAPER = "#ffffff"
MASKED = "#e6e8eb"
Colour = tuple[float, float, float]

# Where a figure of two halves has its pictures, and its explanations below: shares of
# the figure.
LEFT_HALF = (0.055, 0.18, 0.415, 0.675)
EXPLANATION_TOP = 0.098
COLUMNS_OF_HALF = 74
SIZE_OF_HALVES = (12.4, 7.5)

_DOTS_PER_INCH = 150
_SATURATION = 0.62
_FIRST_HUE = 0.07


@contextmanager
def fixed_style() -> Iterator[None]:
    """Draw in the same style, whatever style the program has.

    A program's style may ask for LaTeX, which is not everywhere and reads "%" and "_"
    otherwise. The context decorates functions, too.
    """
    try:
        from matplotlib import style
    except ImportError as error:
        raise ImportError(
            f"drawing needs matplotlib: {install_hint('draw')}"
        ) from error
    with style.context("default"):
        yield


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=PAPER)


@fixed_style()
def check_drawable(path: str | PathLike[str]) -> Path:
    """Check, before anything is computed, that a picture can be written; returns its
    file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: its ending is no picture format.
    """
    _picture_format(new_figure(1, 1), path)
    return check_target(path)


def _picture_format(figure: Any, path: str | PathLike[str]) -> str:
    """The picture format by the ending of ``path``; PNG without an ending."""
    ending = os.path.splitext(path)[1].removeprefix(".").lower() or "png"
    formats = figure.canvas.get_supported_filetypes()
    if ending not in formats:
        raise ValueError(
            f"{os.fspath(path)!r} must end in one of {', '.join(sorted(formats))}, "
            "for the picture's format"
        )
    return ending


def save(figure: Any, path: str | PathLike[str]) -> None:
    """Write ``figure``, completely or not at all.

    Args:
        path: its ending is the format (.png, .svg, .pdf).
    """
    picture_format = _picture_format(figure, path)
    with atomic_write(path) as file:
        figure.savefig(
            file,
            format=picture_format,
            dpi=_DOTS_PER_INCH,
            facecolor=PAPER,
        )


def remove_frame(axes: Any) -> None:
    """Remove the frame and the ticks."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def write_heading(axes: Any, title: str, note: str = "") -> None:
    """Write a title and a note over the top left corner of ``axes``."""
    axes.set_title(
        title,
        loc="left",
        pad=26,
        size=12,
        color=INK,
        weight="bold",
    )
    axes.annotate(
        note,
        (0, 1),
        (0, 13),
        xycoords="axes fraction",
        textcoords="offset points",
        size=10,
        color=SOFT,
    )


def write_explanation(
    figure: Any, x: float, top: float, columns: int, text: str
) -> None:
    """Write what a picture shows, for someone who sees one for the first time.

    Args:
        x, top: where the text begins, in shares of the figure.
        columns: characters of a line.
    """
    lines = textwrap.fill(text, columns)
    figure.text(
        x,
        top,
        lines,
        color=SOFT,
        size=9.5,
        va="top",
        linespacing=1.45,
    )


def colour_at(turn: float, lightness: float = 0.67) -> Colour:
    """The colour at a place on the circle of hues, from 0 to 1."""
    return hls_to_rgb((turn + _FIRST_HUE) % 1.0, lightness, _SATURATION)
