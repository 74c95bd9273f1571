"""One task's mask over its own tokens: the pairs it keeps, and those it leaves to other tasks."""

from __future__ import annotations

from typing import Any

from quorum_attention.decomposition import Decomposition, Pairs, Task
from quorum_attention.pictures.canvas import INK, MASKED, ON_COLOUR, PAPER, SOFT, bare
from quorum_attention.pictures.colours import Colour, task_colour
from quorum_attention.pictures.geometry import Block, Point, chunk_edges, kept

_LABELLED_SPANS = 9


def draw_task_mask(axes: Any, shape: Decomposition, pairs: Pairs, task: Task) -> str:
    """Draw the mask of one task on ``axes``; returns a line of text to put above it."""
    from matplotlib.collections import PolyCollection

    axes.set_xlim(0, max(1, task.n_tokens))
    axes.set_ylim(max(1, task.n_tokens), 0)
    axes.set_aspect("equal", anchor="NW")
    bare(axes)
    mine, masked, owned = _cells(task, pairs)
    colour = task_colour(task.path, shape.levels)
    width = 1.2 if len(task.spans) <= 16 else 0.3
    quiet: dict[str, Any] = {"edgecolors": PAPER, "linewidths": 0 if pairs.verdict else width}
    axes.add_collection(PolyCollection(masked, facecolors=MASKED, **quiet))
    axes.add_collection(PolyCollection(mine, facecolors=[colour], **quiet))
    axes.add_collection(
        PolyCollection(owned, facecolors="none", edgecolors=ON_COLOUR, linewidths=1.6, zorder=4)
    )
    # Under a mask kernels cut their calls themselves.
    calls = 0 if pairs.verdict else _number_calls(axes, task, pairs.is_causal, colour)
    _name_spans(axes, task, shape)
    _legend(axes, colour, bool(masked), bool(calls))
    share = task.n_tokens / shape.n_tokens if shape.n_tokens else 0.0
    name = f"task {', '.join(map(str, task.path))}" if task.path else "the whole call"
    text = f"{name}: {share:.1%} of the tokens"
    return text + f", {calls} call{'' if calls == 1 else 's'} of the attention kernel" * bool(calls)


Cells = list[list[Point]]


def _cells(task: Task, pairs: Pairs) -> tuple[Cells, Cells, Cells]:
    """(kept, masked, owned diagonal) polygons, x the keys and y the queries."""
    mine: Cells = []
    masked: Cells = []
    owned: Cells = []
    starts, cell = task.local_starts, max(1, task.n_tokens // 256)
    for i, row in enumerate(task.spans):
        for j, column in enumerate(task.spans):
            if pairs.is_causal and j > i:
                break
            across, down = starts[j] - column.start, starts[i] - row.start
            whole = Block(
                row.start, row.stop, column.start, column.stop, pairs.is_causal and i == j
            )
            for part in kept(whole, pairs, cell):
                corners = [(x + across, y + down) for x, y in part.corners()]
                (masked if row.bits & column.bits else mine).append(corners)
            if i == j and row.bits == 0:
                owned.append([(x + across, y + down) for x, y in whole.corners()])
    return mine, masked, owned


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


def _legend(axes: Any, colour: Colour, any_masked: bool, any_calls: bool) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label="computed here")]
    if any_masked:
        handles.append(Patch(facecolor=MASKED, label="elsewhere"))
    handles.append(
        Patch(facecolor="none", edgecolor=INK, linewidth=1.6, label="a chunk with itself")
    )
    if any_calls:
        dashes = (0, (3, 2))
        handles.append(
            Patch(facecolor="none", edgecolor=INK, linestyle=dashes, label="one kernel call")
        )
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(-0.02, -0.075), ncols=4, frameon=False,
        fontsize=9.5, labelcolor=SOFT, handlelength=1.2, columnspacing=1.2, borderpad=0,
    )  # fmt: skip
