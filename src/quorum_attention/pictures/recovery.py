"""The picture of a recovery: how the call was cut, and how much memory each method
took."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from quorum_attention.decomposition import Decomposition, Pairs
from quorum_attention.pictures.bars import Bar, draw_bars
from quorum_attention.pictures.coverage import draw_all_pairs, summary_of
from quorum_attention.pictures.figures import (
    COLUMNS_OF_HALF,
    EXPLANATION_TOP,
    INK,
    SIZE_OF_HALVES,
    Colour,
    colour_at,
    fixed_style,
    new_figure,
    save,
    write_explanation,
    write_heading,
)
from quorum_attention.units import format_bytes

_WITHIN_BUDGET = colour_at(0.35)
_BEYOND_BUDGET: Colour = (0.86, 0.36, 0.3)
_RIGHT_HALF = (0.545, 0.18, 0.42, 0.675)
_DASHES = (0, (4, 3))


@fixed_style()
def draw_recovery(
    path: str | PathLike[str],
    *,
    decomposition: Decomposition,
    is_causal: bool,
    budget_bytes: int,
    bars: Sequence[tuple[str, int, str, bool]],
    note: str = "",
) -> None:
    """Write a picture of a recovery: the coverage on the left, bars of memory on the
    right.

    Args:
        path: the file; its ending is the format (.png, .svg, .pdf).
        decomposition, is_causal: what the coverage shows.
        budget_bytes: drawn as a line across the bars.
        bars: (label, bytes, note, whether it ran within the budget), from top to
            bottom; those that did not are red.
        note: which pass was cut so, where the other was cut in another way.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(*SIZE_OF_HALVES)
    pairs = Pairs(decomposition.n_tokens, decomposition.n_tokens, is_causal)
    kind = "causal" if is_causal else ""
    words = ", ".join(filter(None, [kind, note]))
    draw_all_pairs(
        figure,
        decomposition,
        pairs,
        summary_of(decomposition, words),
    )
    axes = figure.add_axes(_RIGHT_HALF)
    draw_bars(
        axes,
        [_memory_bar(*bar) for bar in bars],
        budget_bytes,
    )
    axes.axvline(
        budget_bytes,
        color=INK,
        linewidth=1.4,
        linestyle=_DASHES,
        zorder=3,
    )
    write_heading(axes, f"Memory of the same call; budget {format_bytes(budget_bytes)}")
    text = (
        "Peak memory of each method, beyond what was allocated before the call. "
        "Green: within the budget (the dashed line). Red: beyond it, or failed."
    )
    write_explanation(
        figure,
        _RIGHT_HALF[0],
        EXPLANATION_TOP,
        COLUMNS_OF_HALF,
        text,
    )
    save(figure, path)


def _memory_bar(label: str, n_bytes: int, note: str, is_within_budget: bool) -> Bar:
    colour = _WITHIN_BUDGET if is_within_budget else _BEYOND_BUDGET
    return Bar(
        f"{label}: {format_bytes(n_bytes)}",
        n_bytes,
        colour,
        note,
    )
