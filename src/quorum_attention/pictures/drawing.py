"""Four pictures: what each task computes, a recovery, a report, and what ran where and when."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from contextlib import contextmanager
from itertools import pairwise
from math import isqrt
from os import PathLike
from pathlib import Path
from typing import Any

from quorum_attention.decomposition import Decomposition, Pairs, Rectangle, Task
from quorum_attention.extras import install_hint
from quorum_attention.pictures.geometry import Point, blocks, corners, kept, shallow
from quorum_attention.units import counted, format_bytes, format_seconds
from quorum_attention.writing import atomic_write, check_target

INK = "#22262b"
SOFT = "#6b7280"
PAPER = "#ffffff"
MASKED = "#e6e8eb"
Colour = tuple[float, float, float]


@contextmanager
def own_style() -> Iterator[None]:
    """A block, or a decorated function, whose figures look the same whatever style the program has:
    one may ask for LaTeX, which is not everywhere and reads "%" and "_" otherwise."""
    try:
        from matplotlib import style
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib: {install_hint('draw')}") from error
    with style.context("default"):
        yield


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=PAPER)


@own_style()
def check_drawable(path: str | PathLike[str]) -> Path:
    """Check, before anything is computed, that a picture can be written; returns its file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
        ValueError: its ending is no picture format.
    """
    _format(new_figure(1, 1), path)
    return check_target(path)


def _format(figure: Any, path: str | PathLike[str]) -> str:
    """The picture format by the ending of ``path``; PNG without an ending."""
    ending = os.path.splitext(path)[1].removeprefix(".").lower() or "png"
    known = figure.canvas.get_supported_filetypes()
    if ending not in known:
        raise ValueError(
            f"{os.fspath(path)!r} must end in one of {', '.join(sorted(known))}, for the picture's "
            f"format"
        )
    return ending


def save(figure: Any, path: str | PathLike[str]) -> None:
    """Write ``figure``, completely or not at all; the ending of ``path`` is the format (.png, .svg,
    .pdf)."""
    with atomic_write(path) as file:
        figure.savefig(file, format=_format(figure, path), dpi=150, facecolor=PAPER)


def bare(axes: Any) -> None:
    """Remove the frame and the ticks."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def headed(axes: Any, title: str, note: str = "") -> None:
    """Write a title and a note over the top left corner of ``axes``."""
    axes.set_title(title, loc="left", pad=26, size=12, color=INK, weight="bold")
    axes.annotate(note, (0, 1), (0, 13), xycoords="axes fraction", textcoords="offset points",
                  size=10, color=SOFT)  # fmt: skip


def explain(figure: Any, left: float, top: float, columns: int, text: str) -> None:
    """Write what a picture shows, for someone who sees one for the first time: ``text`` in lines of
    so many characters, from ``left`` and ``top`` (shares of the figure) on downwards."""
    figure.text(
        left, top, textwrap.fill(text, columns), color=SOFT, size=9.5, va="top", linespacing=1.45
    )


def hue(turn: float, lightness: float = 0.67) -> Colour:
    """A colour by its place on a circle, from 0 to 1."""
    return hls_to_rgb((turn + 0.07) % 1.0, lightness, 0.62)


MAX_BLOCKS = 20_000
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
    save(_figure(decomposition, pairs, tasks, kept), path)


def _figure(
    decomposition: Decomposition, pairs: Pairs, tasks: Sequence[Task] | None, kept: str
) -> Any:
    """The picture as a matplotlib figure."""
    figure = new_figure(12.4, 7.5)
    square(
        figure,
        decomposition,
        pairs,
        summary(decomposition, kept, None if tasks is None else len(tasks)),
    )
    right = figure.add_axes((0.555, 0.18, 0.415, 0.675))
    # One whose owner chunk lies between its other chunks, if there is one.
    path = tuple(1 if c > 1 else 0 for c in decomposition.levels)
    task = decomposition.task(path)
    if tasks is not None:
        task = next((task for task in tasks if task.path == path), tasks[len(tasks) // 2])
    headed(right, "One task, on its own tokens only", _draw_task(right, decomposition, pairs, task))
    if decomposition.levels:
        text = (
            "Coloured pairs are computed here, outlined ones are a chunk with itself. Grey pairs "
            "belong to other tasks and would be computed twice otherwise. "
        )
        if pairs.verdict is None:
            text += "What is left are a few calls of an ordinary attention kernel, without a mask."
        explain(figure, 0.555, 0.098, 74, text)
    return figure


def summary(decomposition: Decomposition, kept: str, n_tasks: int | None = None) -> str:
    """The title of a picture of ``decomposition``."""
    parts = [counted(decomposition.n_tokens, "token")]
    if decomposition.levels:
        chunks = " x ".join(map(str, decomposition.levels))
        parts += [f"{chunks} chunks", counted(n_tasks or decomposition.n_tasks, "independent task")]
    else:
        parts.append("one uncut task")
    return ", ".join([*parts, kept] if kept else parts)


def square(figure: Any, decomposition: Decomposition, pairs: Pairs, title: str) -> None:
    """Draw the score square in the left half of ``figure``, in about ``MAX_BLOCKS`` blocks."""
    from matplotlib.collections import PolyCollection

    figure.text(0.055, 0.952, title, color=INK, size=15, weight="bold")
    axes = figure.add_axes((0.055, 0.18, 0.415, 0.675))
    shape = shallow(decomposition, MAX_BLOCKS, pairs.is_causal)
    rows, columns = (max(1, min(n, shape.n_tokens)) for n in (pairs.n_queries, pairs.n_keys))
    cell = max(1, shape.n_tokens // (2 * isqrt(MAX_BLOCKS)))
    polygons: list[list[Point]] = []
    colours: list[Colour] = []
    for task in shape.tasks():
        for block in blocks(task, pairs, cell):
            polygons.append(corners(block))
            colours.append(task_colour(task.path, shape.levels))
    axes.add_collection(
        PolyCollection(polygons, facecolors=colours, edgecolors=colours, linewidths=0.15)
    )
    bare(axes)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_aspect("equal" if 1 / 3 <= rows / columns <= 3 else "auto", anchor="NW")
    _number_chunks(axes, [0, *(span.stop for span in shape.whole().spans)], rows, columns)
    note = "each pair in exactly one task: its colour says which"
    if not shape.levels:
        note = "one call computes every pair"
    elif shape.depth < decomposition.depth:
        note += f"; {shape.depth} of {decomposition.depth} levels of cutting drawn"
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
    explain(figure, 0.055, 0.098, 74, text)


def _number_chunks(axes: Any, edges: list[int], rows: int, columns: int) -> None:
    """White lines along the chunks' edges, and their numbers."""
    if len(edges) <= _NUMBERED:
        axes.vlines(edges[1:-1], 0, rows, PAPER, lw=1.4)
        axes.hlines(edges[1:-1], 0, columns, PAPER, lw=1.4)
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
        unit = f"number of their chunk (of at most {counted(longest, 'token')})"
    axes.set_xlabel(f"keys, by {unit}", color=SOFT, size=10.5)
    axes.set_ylabel("queries", color=SOFT, size=10.5)


def _draw_task(axes: Any, decomposition: Decomposition, pairs: Pairs, task: Task) -> str:
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
            whole = Rectangle(row.start, row.stop, column.start, column.stop, causal)
            where = "elsewhere" if row.bits & column.bits else "computed"
            for part in kept(whole, pairs, cell):
                cells[where].append([(x + across, y + down) for x, y in corners(part)])
            if i == j and row.bits == 0:
                cells["owned"].append([(x + across, y + down) for x, y in corners(whole)])
    width = 0 if pairs.verdict else 1.2 if len(task.spans) <= _NUMBERED else 0.3
    colour = task_colour(task.path, decomposition.levels)
    for name, face, edge, lw in (
        ("elsewhere", MASKED, PAPER, width), ("computed", colour, PAPER, width),
        ("owned", "none", INK, 1.6),
    ):  # fmt: skip
        patches = PolyCollection(cells[name], facecolors=[face], edgecolors=edge, linewidths=lw)
        axes.add_collection(patches)
    axes.set_xlabel("the task's keys", color=SOFT, size=10.5)
    axes.set_ylabel("the task's queries", color=SOFT, size=10.5)
    share = task.n_tokens / decomposition.n_tokens if decomposition.n_tokens else 0.0
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


_FITS, _OVER = hue(0.35), (0.86, 0.36, 0.3)


def _bars(
    axes: Any, bars: Sequence[tuple[str, float, Colour | str, str]], most: float = 0.0
) -> None:
    """Horizontal bars from top to bottom: (label, length, colour, note)."""
    bare(axes)
    axes.set_xlim(0, max([most, *(size for _, size, _, _ in bars), 1e-9]) * 1.02)
    axes.set_ylim(max(3, len(bars)) - 0.4, -0.6)
    behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
    for place, (label, size, colour, note) in enumerate(bars):
        axes.barh(place, size, height=0.34, color=[colour], zorder=2)
        for below, text, ink, points in ((-0.31, label, INK, 10.5), (0.29, note, SOFT, 9.5)):
            axes.text(
                0, place + below, text, color=ink, size=points, va="center", zorder=4, bbox=behind
            )


@own_style()
def draw_recovery(
    path: str | PathLike[str],
    *,
    decomposition: Decomposition,
    is_causal: bool,
    budget_bytes: int,
    bars: Sequence[tuple[str, int, str, bool]],
    note: str = "",
) -> None:
    """Write a picture of a recovery: the coverage on the left, bars of memory on the right.

    Args:
        path: the file; its ending is the format (.png, .svg, .pdf).
        decomposition, is_causal: what the coverage shows.
        budget_bytes: drawn as a line across the bars.
        bars: (label, bytes, note, whether it ran within the budget), from top to bottom; those
            that did not are red.
        note: which pass was cut so, where the other was cut in another way.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12.4, 7.5)
    pairs = Pairs(decomposition.n_tokens, decomposition.n_tokens, is_causal)
    kept = ", ".join(filter(None, ["causal" if is_causal else "", note]))
    square(figure, decomposition, pairs, summary(decomposition, kept))
    right = figure.add_axes((0.545, 0.18, 0.42, 0.675))
    drawn = [
        (f"{label}: {format_bytes(size)}", size, _FITS if ran else _OVER, note)
        for label, size, note, ran in bars
    ]
    _bars(right, drawn, budget_bytes)
    right.axvline(budget_bytes, color=INK, linewidth=1.4, linestyle=(0, (4, 3)), zorder=3)
    headed(right, f"Memory of the same call; budget {format_bytes(budget_bytes)}")
    explain(
        figure, 0.545, 0.098, 74,
        "Peak memory of each method, beyond what was allocated before the call. "
        "Green: within the budget (the dashed line). Red: beyond it, or failed.",
    )  # fmt: skip
    save(figure, path)


@own_style()
def draw_report(path: str | PathLike[str], report: Mapping[str, Any]) -> None:
    """Write a picture of ``Report.to_dict()``: a row for every pass that has run.

    Args:
        path: the file; its ending is the format (.png, .svg, .pdf).
        report: ``forward`` and ``backward``: the fields of a ``PassReport`` each, or None.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing has run yet.
    """
    passes = [(name, part) for name, part in report.items() if part is not None]
    if not passes:
        raise ValueError("report: nothing has run yet, so there is nothing to draw")
    inches = 3.4 * len(passes) + 0.95
    figure = new_figure(12.4, inches)
    height = 3.4 / inches
    for row, (name, part) in enumerate(passes):
        bottom = 1 - (row + 1) * height
        title = _title(name, part)
        figure.text(0.03, bottom + 0.92 * height, title, color=INK, size=12.5, weight="bold")
        places = ((0.03, 0.57), (0.66, 0.31))
        left, right = (
            figure.add_axes((x, bottom + 0.06 * height, width, 0.8 * height)) for x, width in places
        )
        stages = {stage: spent for stage, spent in part["stages"].items() if spent > 0}
        clock = f"wall clock {format_seconds(part['seconds'])}"
        if part.get("overlap") is not None:
            clock += f"; {part['overlap']:.0%} of the transfers hidden"
        note = "" if stages else "stages are not timed in an uncut call or without events"
        bars: list[tuple[str, float, Colour | str, str]] = [(clock, part["seconds"], INK, note)]
        bars += [
            (f"{stage} {format_seconds(spent)}", spent, hue(number / 6, 0.7), "")
            for number, (stage, spent) in enumerate(stages.items())
        ]
        _bars(left, bars)
        sizes = (
            ("measured peak of memory", part["peak_bytes"], _FITS),
            ("planned peak of memory", part["planned_peak_bytes"], "#c3c8ce"),
            ("budget", part["budget_bytes"], MASKED),
        )
        known = [(f"{n} {format_bytes(b)}", b, c, "") for n, b, c in sizes if b is not None]
        _bars(right, known)
    explain(
        figure, 0.03, 0.8 / inches, 160,
        "gather, h2d: a task's rows are collected and copied to the device. compute: calls of the "
        "attention kernel. merge: results are merged with those of other tasks. d2h, scatter: "
        "results are copied back to their places. Stages overlap, so their sum may exceed the "
        "wall-clock time. Memory is beyond what was allocated before.",
    )  # fmt: skip
    save(figure, path)


def _title(name: str, part: Mapping[str, Any]) -> str:
    levels = " x ".join(map(str, part["levels"]))
    cut = f"cut into {levels} chunks" if levels else "not cut"
    title = f"{name}: {cut}, {counted(part['units'], 'unit')} of work, kernel {part['kernel']}"
    if part["recoveries"]:
        title += (
            f", {counted(len(part['recoveries']), 'time')} recovered from running out of memory"
        )
    return title


@own_style()
def draw_gantt(path: str | PathLike[str], passes: Mapping[str, Any]) -> None:
    """Write a picture with a chart for each pass, one above the other on the same scale of time.

    Args:
        path: the file; its ending is the format (.png, .svg, .pdf).
        passes: a ``PoolPass`` each, by title.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing ran.
    """
    if not any(one.ran for one in passes.values()):
        raise ValueError("passes: nothing ran, so there is nothing to draw")
    rows = [len(one.devices) for one in passes.values()]
    figure = new_figure(11.0, 0.26 * (sum(rows) + 3.2 * len(rows) + 1.9))
    figure.set_layout_engine("constrained")
    charts = figure.subplots(len(rows), squeeze=False, sharex=True, height_ratios=rows)[:, 0]
    for axes, (title, one) in zip(charts, passes.items(), strict=True):
        axes.spines[["top", "right", "left"]].set_visible(False)
        for ran in one.ran:
            seconds, colour = ran.stop - ran.start, hue(ran.index / one.parts)
            axes.barh(ran.device, seconds, left=ran.start, height=0.72, color=[colour])
        last = max((ran.stop for ran in one.ran), default=0.0)
        axes.axvline(last, color=INK, lw=1)
        axes.set_ylim(len(one.devices) - 0.4, -0.6)
        axes.set_yticks(range(len(one.devices)), one.devices)
        axes.tick_params(length=0, labelcolor=INK, labelsize=8)
        text = f"{title}: {format_seconds(last)}"
        axes.set_title(text, loc="left", fontsize=10, color=INK, weight="bold")
    text = (
        "Seconds. Each bar is one part of the call (some of its heads, or of their rows), on the "
        "device that computed it; colours only separate parts. The vertical line: all parts are "
        "done."
    )
    figure.supxlabel(textwrap.fill(text, 125), color=SOFT, size=9.5)
    save(figure, path)
