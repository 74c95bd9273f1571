"""A picture of a recovery: the coverage of the decomposition, and memory against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from quorum_attention.decomposition import Decomposition, Pairs
from quorum_attention.pictures.canvas import (
    INK,
    PAPER,
    SOFT,
    above,
    bare,
    explain,
    new_figure,
    own_style,
    save,
)
from quorum_attention.pictures.colours import oklch
from quorum_attention.pictures.coverage import about_square, summary
from quorum_attention.pictures.square import draw_square
from quorum_attention.sizes import format_bytes

_FITS = oklch(0.72, 0.125, 2.75)
_OVER = oklch(0.68, 0.15, 0.5)


@own_style()
def draw_recovery(
    path: str | PathLike[str],
    *,
    decomposition: Decomposition,
    is_causal: bool,
    budget_bytes: int,
    bars: Sequence[tuple[str, int, str, bool]],
) -> None:
    """Write a picture of a recovery: the coverage on the left, bars of memory on the right.

    Args:
        path: the file; its ending is the format (.png, .svg, .pdf).
        decomposition, is_causal: what the coverage shows.
        budget_bytes: drawn as a line across the bars.
        bars: (label, bytes, note, whether it ran within the budget), from top to bottom; those
            that did not are red.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12.4, 7.5)
    left = figure.add_axes((0.055, 0.18, 0.415, 0.675))
    right = figure.add_axes((0.545, 0.18, 0.42, 0.675))
    title = summary(decomposition, "causal" if is_causal else "")
    figure.text(0.055, 0.952, title, color=INK, size=15, weight="bold")
    pairs = Pairs(decomposition.n_tokens, decomposition.n_tokens, is_causal)
    note = draw_square(left, decomposition, pairs)
    above(left, 13, note, 10, SOFT, "normal")
    above(left, 30, "All pairs of a query and a key", 12, INK, "bold")
    explain(figure, 0.055, 0.098, 80, about_square(decomposition, pairs))
    _draw_bars(right, budget_bytes, bars)
    above(right, 30, "Memory of the same call", 12, INK, "bold")
    explain(
        figure, 0.545, 0.098, 80,
        "Most memory that each method had at once, beyond what was there before the call. "
        "Green ran inside the budget (the dashed line), red did not, or would not.",
    )  # fmt: skip
    save(figure, path)


def _draw_bars(axes: Any, budget_bytes: int, bars: Sequence[tuple[str, int, str, bool]]) -> None:
    bare(axes)
    largest = max([budget_bytes, 1, *(size for _, size, _, _ in bars)])
    axes.set_xlim(0, largest * 1.02)
    axes.set_ylim(max(3, len(bars)) - 0.4, -0.6)
    for place, (label, size, note, ran) in enumerate(bars):
        colour = _FITS if ran else _OVER
        axes.barh(place, size, height=0.34, color=[colour], zorder=2)
        _words(axes, place - 0.31, f"{label}: {format_bytes(size)}", INK, 11.5)
        _words(axes, place + 0.29, note, SOFT, 9.5)
    axes.axvline(budget_bytes, color=INK, linewidth=1.4, linestyle=(0, (4, 3)), zorder=3)
    far = budget_bytes > 0.6 * largest
    axes.annotate(
        f"budget {format_bytes(budget_bytes)}", (budget_bytes, 1), (-4 if far else 4, 2),
        xycoords=axes.get_xaxis_transform(), textcoords="offset points", color=INK, size=10.5,
        ha="right" if far else "left", va="bottom",
    )  # fmt: skip


def _words(axes: Any, place: float, text: str, colour: str, size: float) -> None:
    """Text at the left, on a background that covers the line of the budget."""
    axes.text(
        0, place, text, color=colour, size=size, va="center", zorder=4,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip
