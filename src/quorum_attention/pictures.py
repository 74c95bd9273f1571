"""Pictures of a decomposition and of a recovery (matplotlib, the ``draw`` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from quorum_attention.decomposition import Decomposition, Task
from quorum_attention.sizes import format_bytes

# Beyond this many polygons a picture shows no more, it only takes longer.
_MAX_SHAPES = 60_000
_MASKED = "#e9e9ec"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of memory: a label, bytes, and what became of it."""

    label: str
    n_bytes: int
    note: str
    good: bool


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'drawing needs matplotlib: pip install "quorum-attention[draw]"'
        ) from error
    figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no window
    return figure


def draw_coverage(
    decomposition: Decomposition, is_causal: bool, path: str | PathLike[str]
) -> None:
    """Write a picture: who computes which part of the score matrix, and one task's mask.

    Left: the score matrix, each kept pair in the colour of its owner at the first level. Right:
    the local score matrix of one task, what it keeps and what its mask leaves to others.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = _figure(10.4, 5.2)
    left, right = figure.subplots(1, 2)
    _coverage(left, decomposition, is_causal)
    middle = tuple(c // 2 for c in decomposition.levels)
    _local_mask(right, decomposition.task(middle), decomposition, is_causal)
    _save(figure, path)


def draw_recovery(
    decomposition: Decomposition,
    is_causal: bool,
    bars: Sequence[Bar],
    budget_bytes: int,
    path: str | PathLike[str],
) -> None:
    """Write a picture of a recovery: the coverage, and memory against the budget.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = _figure(11.2, 4.9)
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
    _coverage(left, decomposition, is_causal)
    _bars(right, bars, budget_bytes)
    _save(figure, path)


def _save(figure: Any, path: str | PathLike[str]) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)


def _colour(index: int, count: int) -> Any:
    from matplotlib import colormaps

    # Neighbouring owners far apart on the wheel, so that they can be told from each other.
    step = next((s for s in (3, 2, 5) if count % s), 1)
    place = (index * step % max(1, count)) / max(1, count)
    return colormaps["turbo"](0.08 + 0.84 * place)


def _kept_shapes(task: Task, is_causal: bool) -> list[list[tuple[float, float]]]:
    """The task's kept pairs as polygons in global (key, query) positions."""
    shapes: list[list[tuple[float, float]]] = []
    for r in task.rectangles(is_causal):
        for q0, q1, _ in task.segments(r.query_start, r.query_stop):
            for k0, k1, _ in task.segments(r.key_start, r.key_stop):
                if r.causal:
                    if (q0, q1) == (k0, k1):
                        shapes.append([(k0, q0), (k1, q1), (k0, q1)])
                    elif k0 < q0:
                        shapes.append([(k0, q0), (k1, q0), (k1, q1), (k0, q1)])
                else:
                    shapes.append([(k0, q0), (k1, q0), (k1, q1), (k0, q1)])
    return shapes


def _coverage(axes: Any, decomposition: Decomposition, is_causal: bool) -> None:
    from matplotlib.collections import PolyCollection

    n = max(1, decomposition.n_tokens)
    shapes: list[list[tuple[float, float]]] = []
    colours: list[Any] = []
    owners = decomposition.levels[0] if decomposition.levels else 1
    for task in decomposition.tasks():
        found = _kept_shapes(task, is_causal)
        shapes.extend(found)
        colours.extend([_colour(task.path[0] if task.path else 0, owners)] * len(found))
        if len(shapes) > _MAX_SHAPES:
            break
    fine = len(shapes) < 2500
    axes.add_collection(
        PolyCollection(
            shapes,
            facecolors=colours,
            edgecolors="white" if fine else "none",
            linewidths=0.5 if fine else 0.0,
        )
    )
    levels = " x ".join(map(str, decomposition.levels))
    tasks = f"{levels} chunks, {decomposition.n_tasks} tasks" if levels else "one monolithic call"
    cut = "" if len(shapes) <= _MAX_SHAPES else " (some tasks)"
    axes.set_title(f"{_tokens(n)} tokens: {tasks}{cut}", fontsize=11)
    _square(axes, n, "key", "query")
    if len(decomposition.levels) == 1 and owners <= 31:
        handles = [_patch(_colour(i, owners), f"task {i}") for i in range(min(owners, 7))]
        if owners > 7:
            handles.append(_patch("white", f"… {owners} in all"))
        if is_causal:
            axes.legend(handles=handles, loc="upper right", fontsize=8, frameon=False)


def _local_mask(axes: Any, task: Task, decomposition: Decomposition, is_causal: bool) -> None:
    from matplotlib.collections import PolyCollection

    n = max(1, task.n_tokens)
    axes.add_patch(_rectangle(0, 0, n, n, _MASKED))
    owners = decomposition.levels[0] if decomposition.levels else 1
    colour = _colour(task.path[0] if task.path else 0, owners)
    shapes = []
    for r in task.rectangles(is_causal):
        q0, q1, k0, k1 = r.query_start, r.query_stop, r.key_start, r.key_stop
        corners = [(k0, q0), (k1, q1), (k0, q1)]
        shapes.append(corners if r.causal else [(k0, q0), (k1, q0), (k1, q1), (k0, q1)])
    axes.add_collection(
        PolyCollection(shapes, facecolors=[colour], edgecolors="white", linewidths=1.2)
    )
    for start in task.local_starts[1:-1]:
        axes.axhline(start, color="#9a9aa2", linewidth=0.5, linestyle=":")
        axes.axvline(start, color="#9a9aa2", linewidth=0.5, linestyle=":")
    calls = len(shapes)
    path = ", ".join(map(str, task.path))
    axes.set_title(
        f"task ({path}): {_tokens(task.n_tokens)} tokens, {calls} kernel call{'s' * (calls != 1)}",
        fontsize=11,
    )
    _square(axes, n, "key (local)", "query (local)")
    axes.legend(
        handles=[_patch(colour, "computed here"), _patch(_MASKED, "masked, or another task's")],
        loc="upper right",
        fontsize=8,
        frameon=False,
    )


def _bars(axes: Any, bars: Sequence[Bar], budget_bytes: int) -> None:
    gib = 2**20
    top = max([bar.n_bytes for bar in bars] + [budget_bytes]) / gib
    for place, bar in enumerate(bars):
        colour = "#2a7f62" if bar.good else "#c8553d"
        axes.barh(place, bar.n_bytes / gib, color=colour, height=0.5)
        axes.text(
            0.01 * top,
            place - 0.36,
            f"{bar.label}: {format_bytes(bar.n_bytes)}, {bar.note}",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            zorder=3,
        )
    axes.axvline(budget_bytes / gib, color="#222222", linewidth=1.4, linestyle="--")
    axes.text(
        budget_bytes / gib,
        len(bars) - 0.45,
        f" budget {format_bytes(budget_bytes)}",
        fontsize=9,
        va="center",
        ha="left" if budget_bytes / gib < 0.7 * top else "right",
    )
    axes.set_ylim(len(bars) - 0.25, -0.75)
    axes.set_xlim(0, 1.08 * top)
    axes.set_yticks([])
    axes.set_xlabel("memory beyond the inputs (MiB)")
    axes.set_title("memory against the budget", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _square(axes: Any, n: int, x: str, y: str) -> None:
    axes.set_xlim(0, n)
    axes.set_ylim(n, 0)
    axes.set_aspect("equal")
    axes.set_xticks([0, n], ["0", _tokens(n)])
    axes.set_yticks([0, n], ["0", _tokens(n)])
    axes.set_xlabel(x, labelpad=-8)
    axes.set_ylabel(y, labelpad=-14)


def _patch(colour: Any, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, edgecolor="none")


def _tokens(n: int) -> str:
    return f"{n:,}"
