"""A picture of what each task computes: the score square of all tasks, and one task's mask."""

from __future__ import annotations

from os import PathLike
from typing import Any

from quorum_attention.decomposition import Decomposition
from quorum_attention.pictures.canvas import INK, SOFT, above, explain, new_figure, own_style, save
from quorum_attention.pictures.square import MAX_BLOCKS, draw_square
from quorum_attention.pictures.task_mask import draw_task_mask


@own_style()
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
        decomposition: what to draw.
        is_causal: whether keys after the query are masked.
        path: the file; its ending is the format (.png, .svg, .pdf).
        n_queries, n_keys: how many of the tokens are queries and keys; None is all.

    Raises:
        ImportError: matplotlib is not installed.
    """
    save(coverage_figure(decomposition, is_causal, n_queries=n_queries, n_keys=n_keys), path)


def coverage_figure(
    decomposition: Decomposition,
    is_causal: bool,
    *,
    n_queries: int | None = None,
    n_keys: int | None = None,
    limit: int = MAX_BLOCKS,
) -> Any:
    """The picture as a matplotlib figure of about ``limit`` blocks at most; otherwise as
    ``draw_coverage``."""
    figure = new_figure(12.4, 7.5)
    left = figure.add_axes((0.055, 0.18, 0.415, 0.675))
    right = figure.add_axes((0.555, 0.18, 0.415, 0.675))
    figure.text(0.055, 0.952, summary(decomposition, is_causal), color=INK, size=15, weight="bold")
    note = draw_square(left, decomposition, is_causal, n_queries, n_keys, limit)
    above(left, 30, "All pairs of a query and a key", 12, INK, "bold")
    above(left, 13, note, 10, SOFT, "normal")
    explain(figure, 0.055, 0.098, 80, about_square(decomposition, is_causal))
    note = draw_task_mask(right, decomposition, is_causal)
    above(right, 30, "One task, on its own tokens only", 12, INK, "bold")
    above(right, 13, note, 10, SOFT, "normal")
    explain(figure, 0.555, 0.07, 80, _about_task(decomposition))
    return figure


def about_square(shape: Decomposition, is_causal: bool) -> str:
    """What the square of ``shape`` shows, in words."""
    text = "Each point is one pair: its row is the query, its column the key. "
    if is_causal:
        text += "Empty: keys after their query, which are masked. "
    if not shape.levels:
        return text + "Nothing is cut: one call holds all tokens at once."
    again = f", cuts those into {shape.levels[1]} again," if shape.depth > 1 else ""
    return text + (
        f"The tokens are cut into {shape.levels[0]} chunks; a task loads a few of them{again} and "
        "computes the pairs in its colour. All tasks together compute every pair once."
    )


def _about_task(shape: Decomposition) -> str:
    if not shape.levels:
        return ""
    return (
        "Grey pairs belong to other tasks and would be computed twice otherwise. What is left "
        "are a few calls of an ordinary attention kernel, without any mask."
    )


def summary(shape: Decomposition, is_causal: bool) -> str:
    """The title of a picture of ``shape``."""
    parts = [f"{shape.n_tokens:,} tokens"]
    if shape.levels:
        chunks = " x ".join(map(str, shape.levels))
        parts += [f"{chunks} chunks", f"{shape.n_tasks:,} independent tasks"]
    else:
        parts.append("one monolithic task")
    if is_causal:
        parts.append("causal")
    return ", ".join(parts)
