"""A picture of what each task computes: the score square of all tasks, and one task's mask."""

from __future__ import annotations

from os import PathLike

from quorum_attention.decomposition import Decomposition
from quorum_attention.pictures.canvas import INK, SOFT, above, new_figure, save
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
        decomposition: what to draw.
        is_causal: whether keys after the query are masked.
        path: the file; its ending is the format (.png, .svg, .pdf).
        n_queries, n_keys: how many of the tokens are queries and keys; None is all.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12.4, 6.9)
    left = figure.add_axes((0.055, 0.11, 0.415, 0.73))
    right = figure.add_axes((0.555, 0.11, 0.415, 0.73))
    figure.text(0.055, 0.948, summary(decomposition, is_causal), color=INK, size=15, weight="bold")
    note = draw_square(left, decomposition, is_causal, n_queries, n_keys)
    above(left, 30, "The whole score square", 12, INK, "bold")
    above(left, 13, note, 10, SOFT, "normal")
    note = draw_task_mask(right, decomposition, is_causal)
    above(right, 30, "One task, over its own tokens only", 12, INK, "bold")
    above(right, 13, note, 10, SOFT, "normal")
    save(figure, path)


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
