"""What each task computes: the score square of all tasks, and one task's mask."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import isqrt
from os import PathLike
from typing import Any

from quorum_attention.decomposition import Decomposition, Pairs, Task
from quorum_attention.pictures.canvas import (
    INK,
    MASKED,
    ON_COLOUR,
    PAPER,
    SOFT,
    Colour,
    bare,
    explain,
    headed,
    hue,
    new_figure,
    own_style,
    save,
)
from quorum_attention.pictures.geometry import Block, Point, blocks, chunk_edges, kept, shallow

MAX_BLOCKS = 20_000
# More blocks than that would make a page slow; ``draw_coverage`` draws them to a file.
MOST_BLOCKS = 2000
# Chunks and spans up to here have their numbers written beside them.
_NUMBERED = 20


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
    save(_figure(decomposition, pairs, tasks, kept, MAX_BLOCKS), path)


@own_style()
def coverage_svg(
    decomposition: Decomposition,
    pairs: Pairs,
    *,
    tasks: Sequence[Task] | None = None,
    kept: str = "",
) -> str | None:
    """``draw_coverage`` as an <svg> element: text and empty cells take the page's colour, so it can
    be read on a light page and on a dark one. None: matplotlib cannot be imported, or the picture
    would have more than ``MOST_BLOCKS`` blocks."""
    drawn = shallow(decomposition, MOST_BLOCKS, pairs.is_causal)
    last = drawn.task(tuple(c - 1 for c in drawn.levels))
    each = sum(1 for _ in blocks(last, replace(pairs, verdict=None)))
    if each * drawn.n_tasks > MOST_BLOCKS:
        return None
    try:
        figure = _figure(decomposition, pairs, tasks, kept, MOST_BLOCKS)
    except ImportError:  # it is not there, or does not fit the NumPy that is
        return None
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    # Its rules for every element would hold for the rest of the page too.
    svg = re.sub(r"<(style|metadata)\b.*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", svg, count=1)
    style = (
        'role="img" style="width:100%;max-width:62em;height:auto;stroke-linejoin:round;'
        'stroke-linecap:butt"'
    )
    svg = svg.replace("<svg", f"<svg {style}", 1)
    for colour, opacity in ((INK, 1), (SOFT, 0.7), (MASKED, 0.13)):
        for kind in ("fill", "stroke"):
            words = f"{kind}: currentColor; {kind}-opacity: {opacity}"
            svg = svg.replace(f"{kind}: {colour}", words)
    return svg.replace(f"fill: {PAPER}", "fill: none").strip()


def _figure(
    shape: Decomposition, pairs: Pairs, tasks: Sequence[Task] | None, kept: str, limit: int
) -> Any:
    """The picture as a matplotlib figure of about ``limit`` blocks at most."""
    figure = new_figure(12.4, 7.5)
    square(figure, shape, pairs, summary(shape, kept, None if tasks is None else len(tasks)), limit)
    right = figure.add_axes((0.555, 0.18, 0.415, 0.675))
    # One whose owner chunk lies between its other chunks, if there is one.
    path = tuple(1 if c > 1 else 0 for c in shape.levels)
    task = shape.task(path)
    if tasks is not None:
        task = next((task for task in tasks if task.path == path), tasks[len(tasks) // 2])
    headed(right, "One task, on its own tokens only", _draw_task(right, shape, pairs, task))
    if shape.levels:
        text = (
            "Coloured pairs are computed here, outlined ones are a chunk with itself. Grey pairs "
            "belong to other tasks and would be computed twice otherwise. "
        )
        if pairs.verdict is None:
            text += "What is left are a few calls of an ordinary attention kernel, without a mask."
        explain(figure, 0.555, 0.098, 80, text)
    return figure


def summary(shape: Decomposition, kept: str, n_tasks: int | None = None) -> str:
    """The title of a picture of ``shape``."""
    parts = [f"{shape.n_tokens:,} tokens"]
    if shape.levels:
        chunks = " x ".join(map(str, shape.levels))
        parts += [f"{chunks} chunks", f"{n_tasks or shape.n_tasks:,} independent tasks"]
    else:
        parts.append("one monolithic task")
    return ", ".join([*parts, kept] if kept else parts)


def square(
    figure: Any, whole: Decomposition, pairs: Pairs, title: str, limit: int = MAX_BLOCKS
) -> None:
    """Draw the score square in the left half of ``figure``, in about ``limit`` blocks at most."""
    from matplotlib.collections import PolyCollection

    figure.text(0.055, 0.952, title, color=INK, size=15, weight="bold")
    axes = figure.add_axes((0.055, 0.18, 0.415, 0.675))
    shape = shallow(whole, limit, pairs.is_causal)
    rows, columns = (max(1, min(n, shape.n_tokens)) for n in (pairs.n_queries, pairs.n_keys))
    cell = max(1, shape.n_tokens // (2 * isqrt(limit)))
    polygons: list[list[Point]] = []
    colours: list[Colour] = []
    for task in shape.tasks():
        for block in blocks(task, pairs, cell):
            polygons.append(block.corners())
            colours.append(task_colour(task.path, shape.levels))
    axes.add_collection(
        PolyCollection(polygons, facecolors=colours, edgecolors=colours, linewidths=0.15)
    )
    bare(axes)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_aspect("equal" if 1 / 3 <= rows / columns <= 3 else "auto", anchor="NW")
    _number_chunks(axes, chunk_edges(shape), rows, columns)
    note = "each pair in exactly one task: its colour says which"
    if not shape.levels:
        note = "one call computes every pair"
    elif shape.depth < whole.depth:
        note += f"; {shape.depth} of {whole.depth} levels of cutting drawn"
    headed(axes, "All pairs of a query and a key", note)
    text = "Each point is one pair: its row is the query, its column the key. "
    if pairs.verdict is not None or pairs.is_causal:
        text += "Empty: pairs that the mask leaves out. "
    if shape.levels:
        again = f", cuts those into {shape.levels[1]} again," if shape.depth > 1 else ""
        text += (
            f"The tokens are cut into {shape.levels[0]} chunks; a task loads a few of them{again} "
            "and computes the pairs in its colour. All tasks together compute every pair once."
        )
    explain(figure, 0.055, 0.098, 80, text)


def _number_chunks(axes: Any, edges: list[int], rows: int, columns: int) -> None:
    """White lines along the chunks' edges, and their numbers."""
    if len(edges) <= _NUMBERED:
        for edge in edges[1:-1]:
            axes.plot((edge, edge), (0, rows), color=PAPER, lw=1.4)
            axes.plot((0, columns), (edge, edge), color=PAPER, lw=1.4)
    step = 1 if len(edges) <= _NUMBERED else max(1, (len(edges) - 1) // 8)
    for limit, axis in ((columns, axes.xaxis), (rows, axes.yaxis)):
        found = [
            ((start + min(stop, limit)) / 2, str(chunk))
            for chunk, (start, stop) in enumerate(pairwise(edges))
            if start < min(stop, limit) and chunk % step == 0 and len(edges) > 2
        ]
        axis.set_ticks([place for place, _ in found], [name for _, name in found])
        axis.set_tick_params(length=0, labelsize=9.5, labelcolor=SOFT)
    unit = f"position (0 to {max(columns, rows):,})"
    if len(edges) > 2:
        longest = max(stop - start for start, stop in pairwise(edges))
        unit = f"number of their chunk (of at most {longest:,} tokens)"
    axes.set_xlabel(f"keys, by {unit}", color=SOFT, size=10.5)
    axes.set_ylabel("queries", color=SOFT, size=10.5)


def _draw_task(axes: Any, shape: Decomposition, pairs: Pairs, task: Task) -> str:
    """Draw the mask of one task; returns a line of text to put above it."""
    from matplotlib.collections import PolyCollection

    axes.set_xlim(0, max(1, task.n_tokens))
    axes.set_ylim(max(1, task.n_tokens), 0)
    axes.set_aspect("equal", anchor="NW")
    bare(axes)
    cells: dict[str, list[list[Point]]] = {"computed": [], "elsewhere": [], "owned": []}
    starts, cell = task.local_starts, max(1, task.n_tokens // 256)
    for i, row in enumerate(task.spans):
        for j, column in enumerate(task.spans):
            if pairs.is_causal and j > i:
                break
            across, down = starts[j] - column.start, starts[i] - row.start
            causal = pairs.is_causal and i == j
            whole = Block(row.start, row.stop, column.start, column.stop, causal)
            where = "elsewhere" if row.bits & column.bits else "computed"
            for part in kept(whole, pairs, cell):
                cells[where].append([(x + across, y + down) for x, y in part.corners()])
            if i == j and row.bits == 0:
                cells["owned"].append([(x + across, y + down) for x, y in whole.corners()])
    width = 0 if pairs.verdict else 1.2 if len(task.spans) <= _NUMBERED else 0.3
    colour = task_colour(task.path, shape.levels)
    for name, face, edge, lw in (
        ("elsewhere", MASKED, PAPER, width), ("computed", colour, PAPER, width),
        ("owned", "none", ON_COLOUR, 1.6),
    ):  # fmt: skip
        patches = PolyCollection(cells[name], facecolors=[face], edgecolors=edge, linewidths=lw)
        axes.add_collection(patches)
    axes.set_xlabel("the task's keys", color=SOFT, size=10.5)
    axes.set_ylabel("the task's queries", color=SOFT, size=10.5)
    share = task.n_tokens / shape.n_tokens if shape.n_tokens else 0.0
    name = f"task {', '.join(map(str, task.path))}" if task.path else "the whole call"
    text = f"{name}: {share:.1%} of the tokens"
    if pairs.verdict is None:  # under a mask kernels cut their calls themselves
        calls = len(task.rectangles(pairs.is_causal))
        text += f", {calls} call{'' if calls == 1 else 's'} of the attention kernel"
    return text


def task_colour(path: tuple[int, ...], levels: tuple[int, ...]) -> Colour:
    """A task's colour: the hue is its first owner chunk, the lightness its second."""
    turn = path[0] / levels[0] if path else 0.6
    deeper = 0.24 * ((path[1] + 0.5) / levels[1] - 0.5) if len(path) > 1 else 0.0
    return hue(turn, 0.67 + deeper)
