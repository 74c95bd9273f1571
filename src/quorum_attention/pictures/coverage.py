"""A picture of what each task computes: the score square of all tasks, and one task's mask."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from quorum_attention.decomposition import Decomposition, Pairs, Task
from quorum_attention.pictures.canvas import INK, SOFT, above, explain, new_figure, own_style, save
from quorum_attention.pictures.square import MAX_BLOCKS, draw_square
from quorum_attention.pictures.task_mask import draw_task_mask


@own_style()
def draw_coverage(
    decomposition: Decomposition,
    pairs: Pairs,
    path: str | PathLike[str],
    *,
    tasks: Sequence[Task] | None = None,
    kept: str = "",
) -> None:
    """Write a picture of ``decomposition``: every kept block by owner, and one task's mask.

    Args:
        decomposition: what to draw.
        pairs: which pairs the call keeps.
        path: the file; its ending is the format (.png, .svg, .pdf).
        tasks: the trimmed tasks, where tasks are trimmed under the mask.
        kept: ``pairs`` in words, such as "causal, window 4096".

    Raises:
        ImportError: matplotlib is not installed.
    """
    save(coverage_figure(decomposition, pairs, tasks=tasks, kept=kept), path)


def coverage_figure(
    decomposition: Decomposition,
    pairs: Pairs,
    *,
    tasks: Sequence[Task] | None = None,
    kept: str = "",
    limit: int = MAX_BLOCKS,
) -> Any:
    """The picture as a matplotlib figure of about ``limit`` blocks at most; otherwise as
    ``draw_coverage``."""
    figure = new_figure(12.4, 7.5)
    left = figure.add_axes((0.055, 0.18, 0.415, 0.675))
    right = figure.add_axes((0.555, 0.18, 0.415, 0.675))
    title = summary(decomposition, kept, None if tasks is None else len(tasks))
    figure.text(0.055, 0.952, title, color=INK, size=15, weight="bold")
    note = draw_square(left, decomposition, pairs, limit)
    above(left, 30, "All pairs of a query and a key", 12, INK, "bold")
    above(left, 13, note, 10, SOFT, "normal")
    explain(figure, 0.055, 0.098, 80, about_square(decomposition, pairs))
    note = draw_task_mask(right, decomposition, pairs, _example(decomposition, tasks))
    above(right, 30, "One task, on its own tokens only", 12, INK, "bold")
    above(right, 13, note, 10, SOFT, "normal")
    explain(figure, 0.555, 0.07, 80, _about_task(decomposition, pairs))
    return figure


def _example(shape: Decomposition, tasks: Sequence[Task] | None) -> Task:
    """A task whose owner chunk lies between its other chunks, if there is one."""
    path = tuple(1 if c > 1 else 0 for c in shape.levels)
    if tasks is None:
        return shape.task(path)
    return next((task for task in tasks if task.path == path), tasks[len(tasks) // 2])


def about_square(shape: Decomposition, pairs: Pairs) -> str:
    """What the square of ``shape`` shows, in words."""
    text = "Each point is one pair: its row is the query, its column the key. "
    if pairs.verdict is not None:
        text += "Empty: pairs that the mask leaves out. "
    elif pairs.is_causal:
        text += "Empty: keys after their query, which are masked. "
    if not shape.levels:
        return text + "Nothing is cut: one call holds all tokens at once."
    again = f", cuts those into {shape.levels[1]} again," if shape.depth > 1 else ""
    return text + (
        f"The tokens are cut into {shape.levels[0]} chunks; a task loads a few of them{again} and "
        "computes the pairs in its colour. All tasks together compute every pair once."
    )


def _about_task(shape: Decomposition, pairs: Pairs) -> str:
    if not shape.levels:
        return ""
    text = "Grey pairs belong to other tasks and would be computed twice otherwise. "
    if pairs.verdict is not None:
        return text
    return text + (
        "What is left are a few calls of an ordinary attention kernel, without any mask."
    )


def summary(shape: Decomposition, kept: str, n_tasks: int | None = None) -> str:
    """The title of a picture of ``shape``."""
    parts = [f"{shape.n_tokens:,} tokens"]
    if shape.levels:
        chunks = " x ".join(map(str, shape.levels))
        parts += [f"{chunks} chunks", f"{n_tasks or shape.n_tasks:,} independent tasks"]
    else:
        parts.append("one monolithic task")
    if kept:
        parts.append(kept)
    return ", ".join(parts)
