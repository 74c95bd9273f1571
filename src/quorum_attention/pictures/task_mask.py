"""One task's mask over its own tokens: the pairs it keeps, and those it leaves to other tasks."""

from __future__ import annotations

from typing import Any

from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.pictures.canvas import INK, MASKED, ON_COLOUR, PAPER, SOFT, bare
from quorum_attention.pictures.colours import Colour, task_colour
from quorum_attention.pictures.geometry import Point, chunk_edges

_LABELLED_SPANS = 9


def draw_task_mask(axes: Any, shape: Decomposition, is_causal: bool) -> str:
    """Draw the mask of an example task on ``axes``; returns a line of text to put above it."""
    from matplotlib.collections import PolyCollection

    task = shape.task(_example(shape))
    axes.set_xlim(0, max(1, task.n_tokens))
    axes.set_ylim(max(1, task.n_tokens), 0)
    axes.set_aspect("equal", anchor="NW")
    bare(axes)
    kept, masked, owned = _cells(task, is_causal)
    colour = task_colour(task.path, shape.levels)
    quiet: dict[str, Any] = {
        "edgecolors": PAPER,
        "linewidths": 1.2 if len(task.spans) <= 16 else 0.3,
    }
    axes.add_collection(PolyCollection(masked, facecolors=MASKED, **quiet))
    axes.add_collection(PolyCollection(kept, facecolors=[colour], **quiet))
    axes.add_collection(
        PolyCollection(owned, facecolors="none", edgecolors=ON_COLOUR, linewidths=1.6, zorder=4)
    )
    calls = _number_calls(axes, task, is_causal, colour)
    _name_spans(axes, task, shape)
    _legend(axes, colour, bool(masked))
    share = task.n_tokens / shape.n_tokens if shape.n_tokens else 0.0
    name = f"task {', '.join(map(str, task.path))}" if task.path else "the whole call"
    plural = "" if calls == 1 else "s"
    return f"{name}: {share:.1%} of the tokens, {calls} call{plural} of the attention kernel"


def _example(shape: Decomposition) -> tuple[int, ...]:
    """The path of a task whose owner chunk lies between its other chunks, if there is one."""
    return tuple(1 if c > 1 else 0 for c in shape.levels)


Cells = list[list[Point]]


def _cells(task: Task, is_causal: bool) -> tuple[Cells, Cells, Cells]:
    """(kept, masked, owned diagonal) polygons, x the keys and y the queries."""
    kept: Cells = []
    masked: Cells = []
    owned: Cells = []
    starts = task.local_starts
    for i, row in enumerate(task.spans):
        top, bottom = starts[i], starts[i + 1]
        for j, column in enumerate(task.spans):
            if is_causal and j > i:
                break
            left, right = starts[j], starts[j + 1]
            corners: list[Point] = [(left, top), (right, bottom), (left, bottom)]
            if not (is_causal and i == j):
                corners.insert(1, (right, top))
            (masked if row.bits & column.bits else kept).append(corners)
            if i == j and row.bits == 0:
                owned.append(corners)
    return kept, masked, owned


def _number_calls(axes: Any, task: Task, is_causal: bool, colour: Colour) -> int:
    """Outline and number the task's rectangles, each a plain attention call; returns how many."""
    from matplotlib.patches import Rectangle

    calls = task.rectangles(is_causal)
    few = len(calls) <= 24
    for number, r in enumerate(calls, start=1):
        if not r.causal:
            axes.add_patch(
                Rectangle(
                    (r.key_start, r.query_start),
                    r.n_keys,
                    r.n_queries,
                    fill=False,
                    edgecolor=ON_COLOUR,
                    linewidth=0.9 if few else 0.4,
                    linestyle=(0, (3, 2)),
                    zorder=5,
                )
            )
        if few and min(r.n_keys, r.n_queries) * 24 > task.n_tokens:
            shift = 3 if r.causal else 2
            axes.text(
                r.key_start + r.n_keys / shift,
                r.query_stop - r.n_queries / shift,
                str(number),
                ha="center", va="center", size=11, color=ON_COLOUR, zorder=6,
                bbox={"boxstyle": "circle,pad=0.25", "facecolor": colour, "edgecolor": "none"},
            )  # fmt: skip
    return len(calls)


def _name_spans(axes: Any, task: Task, shape: Decomposition) -> None:
    axes.set_xlabel("the task's keys", color=SOFT, size=10.5)
    axes.set_ylabel("the task's queries", color=SOFT, size=10.5)
    if shape.depth != 1 or len(task.spans) > _LABELLED_SPANS:
        return
    edges = chunk_edges(shape)
    starts = task.local_starts
    places, names = [], []
    for i, span in enumerate(task.spans):
        places.append((starts[i] + starts[i + 1]) / 2)
        first = max(c for c, edge in enumerate(edges[:-1]) if edge <= span.start)
        names.append(f"{first}")
    axes.set_xticks(places, names)
    axes.set_yticks(places, names)
    axes.tick_params(length=0, labelsize=9.5, labelcolor=SOFT)
    axes.set_xlabel("the task's keys, by number of their chunk", color=SOFT, size=10.5)
    axes.set_ylabel("the task's queries", color=SOFT, size=10.5)


def _legend(axes: Any, colour: Colour, any_masked: bool) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label="computed here")]
    if any_masked:
        handles.append(Patch(facecolor=MASKED, label="elsewhere"))
    handles += [
        Patch(facecolor="none", edgecolor=INK, linewidth=1.6, label="a chunk with itself"),
        Patch(facecolor="none", edgecolor=INK, linestyle=(0, (3, 2)), label="one kernel call"),
    ]
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(-0.02, -0.075), ncols=4, frameon=False,
        fontsize=9.5, labelcolor=SOFT, handlelength=1.2, columnspacing=1.2, borderpad=0,
    )  # fmt: skip
