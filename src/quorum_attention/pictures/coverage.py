"""Who computes what: the score square of all tasks, and the mask of one of them."""

from __future__ import annotations

from os import PathLike
from typing import Any

from quorum_attention.decomposition import Decomposition
from quorum_attention.pictures.canvas import INK, SOFT, new_figure, save
from quorum_attention.pictures.square import draw_square
from quorum_attention.pictures.task_mask import draw_task_mask


def draw_coverage(
    decomposition: Decomposition,
    is_causal: bool,
    path: str | PathLike[str],
    *,
    n_queries: int | None = None,
    n_keys: int | None = None,
) -> None:
    """Write a picture of ``decomposition``: every kept block by owner, and one task's mask.

    Args:
        is_causal: whether keys after the query are left out.
        path: where to; its ending names the format (.png, .svg, .pdf).
        n_queries, n_keys: queries and keys there are; None is all tokens.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12.4, 6.9)
    left = figure.add_axes((0.055, 0.11, 0.415, 0.73))
    right = figure.add_axes((0.555, 0.11, 0.415, 0.73))
    figure.text(0.055, 0.948, summary(decomposition, is_causal), color=INK, size=15, weight="bold")
    note = draw_square(left, decomposition, is_causal, n_queries, n_keys)
    _caption(left, "The whole score square", note)
    note = draw_task_mask(right, decomposition, is_causal)
    _caption(right, "One task, over its own tokens only", note)
    save(figure, path)


def summary(shape: Decomposition, is_causal: bool) -> str:
    """One line on what is drawn."""
    parts = [f"{shape.n_tokens:,} tokens"]
    if shape.levels:
        chunks = " x ".join(map(str, shape.levels))
        parts += [f"{chunks} chunks", f"{shape.n_tasks:,} independent tasks"]
    else:
        parts.append("one monolithic task")
    if is_causal:
        parts.append("causal")
    return ", ".join(parts)


def _caption(axes: Any, title: str, note: str) -> None:
    axes.annotate(
        title, (0, 1), (0, 30), xycoords="axes fraction", textcoords="offset points",
        size=12, color=INK, weight="bold",
    )  # fmt: skip
    axes.annotate(
        note, (0, 1), (0, 13), xycoords="axes fraction", textcoords="offset points",
        size=10, color=SOFT,
    )  # fmt: skip
