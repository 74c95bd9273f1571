"""The score square in global positions, every kept block in the colour of its task."""

from __future__ import annotations

from itertools import pairwise
from math import isqrt
from typing import Any

from quorum_attention.decomposition import Decomposition, Pairs
from quorum_attention.pictures.canvas import MASKED, ON_COLOUR, PAPER, SOFT, bare
from quorum_attention.pictures.colours import Colour, task_colour
from quorum_attention.pictures.geometry import Point, blocks, chunk_edges, shallow, split

MAX_BLOCKS = 20_000
_LABELLED_CHUNKS = 13


def draw_square(
    axes: Any,
    decomposition: Decomposition,
    pairs: Pairs,
    limit: int = MAX_BLOCKS,
) -> str:
    """Draw the square on ``axes``, in about ``limit`` blocks at most; returns a line of text to put
    above it."""
    from matplotlib.collections import PolyCollection

    shape = shallow(decomposition, limit, pairs.is_causal)
    rows, columns = (min(n, shape.n_tokens) for n in (pairs.n_queries, pairs.n_keys))
    cell = max(1, shape.n_tokens // (2 * isqrt(limit)))
    edges = chunk_edges(shape)
    numbered = shape.depth == 1 and shape.levels[0] <= _LABELLED_CHUNKS and not pairs.verdict
    polygons: list[list[Point]] = []
    colours: list[Colour] = []
    for task in shape.tasks():
        colour = task_colour(task.path, shape.levels)
        for block in blocks(task, pairs, cell):
            polygons.append(block.corners())
            colours.append(colour)
            if numbered:
                for part in split(block, edges):
                    if (part.query_stop - part.query_start) * 30 > max(rows, columns):
                        _number(axes, part.centre(), task.path[0])
    axes.add_collection(
        PolyCollection(
            polygons,
            facecolors=colours,
            edgecolors=colours if not numbered else "none",
            linewidths=0.15,
        )
    )
    _grid(axes, edges, rows, columns, pairs.is_causal)
    _frame(axes, rows, columns)
    _chunk_numbers(axes, edges, rows, columns)
    if not shape.levels:
        return "one call computes every pair"
    if shape.depth < decomposition.depth:
        drawn = f"{shape.depth} of {decomposition.depth} levels of cutting drawn"
        return f"each pair in exactly one task; {drawn}"
    if shape.depth > 1:
        return "each pair in exactly one task: hue is its first number, shade its second"
    if numbered:
        return "each pair in exactly one task: number and colour say which"
    return "each pair in exactly one task: its colour says which"


def _number(axes: Any, at: Point, number: int) -> None:
    axes.text(*at, str(number), ha="center", va="center", size=10.5, color=ON_COLOUR, zorder=4)


def _grid(axes: Any, edges: list[int], rows: int, columns: int, is_causal: bool) -> None:
    from matplotlib.collections import LineCollection

    lines: list[tuple[Point, Point]] = []
    for edge in sorted({e for e in edges if e > 0}):
        if edge < rows:
            lines.append(((0, edge), (min(columns, edge) if is_causal else columns, edge)))
        if edge < columns:
            lines.append(((edge, edge if is_causal else 0), (edge, rows)))
    width = 1.4 if len(edges) <= 20 else 0.35
    axes.add_collection(LineCollection(lines, colors=PAPER, linewidths=width, zorder=3))


def _frame(axes: Any, rows: int, columns: int) -> None:
    bare(axes)
    axes.set_xlim(0, max(1, columns))
    axes.set_ylim(max(1, rows), 0)
    near_square = 1 / 3 <= max(1, rows) / max(1, columns) <= 3
    axes.set_aspect("equal" if near_square else "auto", anchor="NW")
    axes.set_facecolor(PAPER)
    for side in axes.spines.values():
        side.set_visible(True)
        side.set_color(MASKED)


def _chunk_numbers(axes: Any, edges: list[int], rows: int, columns: int) -> None:
    step = 1 if len(edges) <= 20 else max(1, (len(edges) - 1) // 8)
    for limit, axis in ((columns, axes.xaxis), (rows, axes.yaxis)):
        places, names = [], []
        for chunk, (start, stop) in enumerate(pairwise(edges)):
            stop = min(stop, limit)
            if start < stop and chunk % step == 0 and len(edges) > 2:
                places.append((start + stop) / 2)
                names.append(str(chunk))
        axis.set_ticks(places, names)
        axis.set_tick_params(length=0, labelsize=9.5, labelcolor=SOFT)
    unit = f"position (0 to {max(columns, rows):,})"
    if len(edges) > 2:
        size = max(stop - start for start, stop in pairwise(edges))
        unit = f"number of their chunk ({size:,} tokens each)"
    axes.set_xlabel(f"keys, by {unit}", color=SOFT, size=10.5)
    axes.set_ylabel("queries", color=SOFT, size=10.5)
